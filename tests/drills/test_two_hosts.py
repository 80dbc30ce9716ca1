"""Two hosts in Linux namespaces, joined by the commands of docs/placement.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from embodied_ppo.training import checkpoint
from tests.integration.test_placements import rows

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "placement.md"
NAMESPACES = "unshare --fork --kill-child --mount --mount-proc --net --pid --uts --ipc"
SMALL = """env.num_envs=8 algorithm.horizon=16 algorithm.global_batch_size=32
    algorithm.update_epoch=2 model.hidden=[16] evaluation.episodes=4 evaluation.video_episodes=0
    updates=4 env_steps=null save_every=2 compile=never device=cpu"""
INSIDE = """
mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray
mount --bind {home}/hosts /etc/hosts && mount --bind /dev/null /etc/resolv.conf
echo {name} > /proc/sys/kernel/hostname
sleep infinity &
echo ready
wait
"""
CABLE = """
ip link set lo up && ip address add {address}/24 dev cable && ip link set cable up
ip route add default dev cable
ip route add unreachable 169.254.0.0/16
"""


class Host:
    """Separate network, process ids, host name, /dev/shm and /tmp/ray.

    /etc/hosts is Debian's, and the home directory is empty.
    """

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.home, self.address = folder / name, address
        self.home.mkdir()
        (self.home / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        inside = INSIDE.format(home=self.home, name=name)
        self.outer = subprocess.Popen(
            [*NAMESPACES.split(), "bash", "-ec", inside], stdout=subprocess.PIPE, text=True
        )
        assert self.outer.stdout is not None and self.outer.stdout.readline() == "ready\n"
        self.init = int(Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text())
        self.spaces = {os.readlink(f"/proc/{self.init}/ns/{k}") for k in ("net", "pid", "mnt")}

    def run(
        self, line: str, *, cwd: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line on the host."""
        environment = {name: x for name, x in os.environ.items() if not name.startswith("RAY_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment |= {"HOME": str(self.home), "PATH": path}
        enter = ["nsenter", f"--target={self.init}", "--all", f"--wd={cwd or self.home}"]
        command = [*enter, "bash", "-ec", line]
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert not check or process.returncode == 0, f"{line}\n{process.stdout}\n{process.stderr}"
        return process

    def processes(self) -> dict[int, str]:
        """Return process id -> command line, without the processes that keep the host alive."""
        commands = {}
        for entry in Path("/proc", str(self.init), "root", "proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):  # has just ended
                if line := entry.read_bytes():  # empty: it has ended and was not waited for
                    commands[int(entry.parent.name)] = line.replace(b"\0", b" ").decode()
        others = {pid: line for pid, line in commands.items() if pid > 1}
        return {pid: x for pid, x in others.items() if x.split() != ["sleep", "infinity"]}


def new_processes(host: Host, before: dict[int, str]) -> dict[int, str]:
    """Return the processes that were started since ``before`` and do not end within 20 s.

    Idle workers that Ray keeps are not counted.
    """
    until = time.monotonic() + 20
    while True:
        new = {pid: line for pid, line in host.processes().items() if pid not in before}
        started = {pid: line for pid, line in new.items() if not line.startswith("ray::IDLE")}
        if not started or time.monotonic() > until:
            return started
        time.sleep(0.2)


def commands() -> dict[str, str]:
    """Return key option -> command line of the page's section on several machines."""
    section = PAGE.read_text().partition("## Several machines")[2].partition("\n## ")[0]
    lines = [line.partition("#")[0].strip() for line in section.split("```")[1].splitlines()]
    lines += [text for text in section.split("`") if text.startswith("ray get-auth-token")]
    keys = ("--head", "--address=", "num_nodes=2", "--generate")
    commands = {key: line for line in lines for key in keys if key in line}
    assert list(commands.values()) == [line for line in lines if line], lines
    assert len(commands) == 4
    return commands


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[tuple[Host, Host]]:
    """Start two hosts in one Ray cluster; the second has the label "sim"."""
    allowed = subprocess.run(
        [*NAMESPACES.split(), "true"], capture_output=True, text=True, check=False
    )
    if allowed.returncode:
        pytest.skip(f"needs namespaces, which root can create: {allowed.stderr.strip()}")
    folder = tmp_path_factory.mktemp("hosts")
    first, second = both = Host("first", "10.77.0.1", folder), Host("second", "10.77.0.2", folder)
    ends = f"netns {first.init} type veth peer name cable netns {second.init}"
    subprocess.run(["ip", "link", "add", "cable", *ends.split()], check=True)
    for host in both:
        enter = ["nsenter", f"--target={host.init}", "--net"]
        subprocess.run([*enter, "bash", "-ec", CABLE.format(address=host.address)], check=True)
    lines = commands()
    try:
        first.run(lines["--generate"])
        token = Path(".ray") / "auth_token"
        (second.home / token).parent.mkdir()
        (second.home / token).write_bytes((first.home / token).read_bytes())
        first.run(lines["--head"])
        second.run(lines["--address="].replace("FIRST", first.address) + " --labels node-group=sim")
        yield both
        for host in both:
            host.run("RAY_AUTH_MODE=token ray stop")
            assert new_processes(host, {}) == {} == host.processes()
            assert host.run("ls /dev/shm").stdout == ""
    finally:
        for host in both:
            host.outer.kill()
            host.outer.wait()
    spaces = first.spaces | second.spaces
    until = time.monotonic() + 20
    while (remaining := spaces & namespaces()) and time.monotonic() < until:
        time.sleep(0.2)
    assert not remaining


def namespaces() -> set[str]:
    """Return the namespaces of all processes."""
    names = set()
    for entry in Path("/proc").glob("[0-9]*/ns/*"):
        # It has ended, or belongs to another user.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            names.add(os.readlink(entry))
    return names


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return checkpoint.open_checkpoint(run_dir).policy()


def test_documented_commands_on_two_hosts_equal_one_host(
    hosts: tuple[Host, Host], tmp_path
) -> None:
    before = [host.processes() for host in hosts]
    line = f"{commands()['num_nodes=2'].replace('NAME', 'cartpole')} {' '.join(SMALL.split())}"
    hosts[0].run(f"{line} cluster.devices_per_node=1 run_dir=two_hosts", cwd=tmp_path)
    assert [new_processes(host, old) for host, old in zip(hosts, before, strict=True)] == [{}, {}]
    one_host_line = line.replace("cluster.num_nodes=2", "").replace("RAY_ADDRESS=auto ", "")
    hosts[0].run(f"{one_host_line} cluster.devices_per_node=2 run_dir=one_host", cwd=tmp_path)
    two_hosts, one_host = tmp_path / "two_hosts", tmp_path / "one_host"
    assert "cpu 1   1     rank 1" in (two_hosts / "log.txt").read_text()
    assert rows(two_hosts) == rows(one_host) and len(rows(two_hosts)) == 5
    one, other = weights(two_hosts), weights(one_host)
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert json.loads((two_hosts / "summary.json").read_text())["updates"] == 4
    assert (two_hosts / "reports" / "step_000004" / "report.html").exists()
    assert list((two_hosts / "tensorboard").iterdir())
    assert sorted(x.name for x in tmp_path.iterdir()) == ["one_host", "two_hosts"]


def test_roles_on_two_hosts_equal_one_process(hosts: tuple[Host, Host], tmp_path) -> None:
    """Simulators, experience, weights and checkpoints are on another host than the driver."""
    train = f"embodied-ppo train experiment=cartpole {' '.join(SMALL.split())}"
    placement = (
        "'cluster.component_placement={env: 1, rollout: 0, actor: 1}'"
        " 'cluster.node_groups={sim: 1}'"
    )
    joined = "cluster.num_nodes=2 cluster.devices_per_node=1"
    before = [host.processes() for host in hosts]
    hosts[0].run(f"RAY_ADDRESS=auto {train} {placement} {joined} run_dir=two_hosts", cwd=tmp_path)
    assert [new_processes(host, old) for host, old in zip(hosts, before, strict=True)] == [{}, {}]
    hosts[0].run(f"{train} run_dir=one_host", cwd=tmp_path)
    two_hosts, one_host = tmp_path / "two_hosts", tmp_path / "one_host"
    assert "cpu 1   1     rank 0  -        rank 0" in (two_hosts / "log.txt").read_text()
    assert rows(two_hosts) == rows(one_host)
    one, other = weights(two_hosts), weights(one_host)
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_run_directory_that_is_not_shared_is_refused(hosts: tuple[Host, Host], tmp_path) -> None:
    hosts[1].run(f"mount -t tmpfs tmpfs {tmp_path}")
    line = commands()["num_nodes=2"].replace("NAME", "cartpole")
    process = hosts[0].run(
        f"{line} cluster.devices_per_node=1 device=cpu", cwd=tmp_path, check=False
    )
    hosts[1].run(f"umount {tmp_path}")
    assert process.returncode == 2, process.stderr
    message = process.stderr.splitlines()[-1]
    assert message.startswith(f"error: run_dir={tmp_path}/runs/cartpole/")
    assert "env,rollout,actor rank" in message and "use a shared file system" in message
    assert list(tmp_path.iterdir()) == []
