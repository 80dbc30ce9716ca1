"""Two hosts with network, processes, names and memory of their own, joined by the commands of
docs/placement.md.
"""

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
APART = "unshare --fork --kill-child --mount --mount-proc --net --pid --uts --ipc"
SMALL = """env.num_envs=8 algorithm.horizon=16 algorithm.global_batch_size=32 algorithm.update_epoch=2 model.hidden=[16]
    evaluation.episodes=4 evaluation.video_episodes=0 updates=4 env_steps=null save_every=2 compile=never device=cpu"""
INSIDE = """
mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray
mount --bind {home}/hosts /etc/hosts && mount --bind /dev/null /etc/resolv.conf
echo {name} > /proc/sys/kernel/hostname
sleep infinity &
echo there
wait
"""
CABLE = """
ip link set lo up && ip address add {address}/24 dev cable && ip link set cable up && ip route add default dev cable
ip route add unreachable 169.254.0.0/16
"""


class Host:
    """Its own network, process ids, host name, /dev/shm and /tmp/ray; Debian's /etc/hosts, a home
    without anything.
    """

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.home, self.address = folder / name, address
        self.home.mkdir()
        (self.home / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        inside = INSIDE.format(home=self.home, name=name)
        self.outer = subprocess.Popen(
            [*APART.split(), "bash", "-ec", inside], stdout=subprocess.PIPE, text=True
        )
        assert self.outer.stdout is not None and self.outer.stdout.readline() == "there\n"
        self.init = int(Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text())
        self.spaces = {
            os.readlink(f"/proc/{self.init}/ns/{kind}") for kind in ("net", "pid", "mnt")
        }

    def run(
        self, line: str, *, cwd: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A command line typed there."""
        mine = {name: x for name, x in os.environ.items() if not name.startswith("RAY_")}
        mine |= {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        words = [
            "nsenter",
            f"--target={self.init}",
            "--all",
            f"--wd={cwd or self.home}",
            "bash",
            "-ec",
            line,
        ]
        done = subprocess.run(
            words, env=mine, capture_output=True, text=True, timeout=300, check=False
        )
        assert not check or done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done

    def processes(self) -> dict[int, str]:
        """Process ids and command lines of whatever runs there, besides what keeps the host
        alive.
        """
        found = {}
        for entry in Path("/proc", str(self.init), "root", "proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):  # has just ended
                if words := entry.read_bytes():  # none: it has ended, and nobody asked how
                    found[int(entry.parent.name)] = words.replace(b"\0", b" ").decode()
        return {
            pid: words
            for pid, words in found.items()
            if pid > 1 and words.split() != ["sleep", "infinity"]
        }


def left(host: Host, before: dict[int, str]) -> dict[int, str]:
    """What runs there now and not before, if it does not end within a while; workers that Ray has
    in store aside.
    """
    until = time.monotonic() + 20
    while True:
        now = {
            pid: words
            for pid, words in host.processes().items()
            if not words.startswith("ray::IDLE")
        }
        found = {pid: words for pid, words in now.items() if pid not in before}
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.2)


def commands() -> dict[str, str]:
    """Return the commands of the page's section by what they start."""
    section = PAGE.read_text().partition("## Several machines")[2].partition("\n## ")[0]
    lines = [line.partition("#")[0].strip() for line in section.split("```")[1].splitlines()]
    lines += [text for text in section.split("`") if text.startswith("ray get-auth-token")]
    told = {
        key: line
        for line in lines
        for key in ("--head", "--address=", "num_nodes=2", "--generate")
        if key in line
    }
    assert list(told.values()) == [line for line in lines if line] and len(told) == 4, lines
    return told


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """Two machines that joined one Ray cluster; the second bears the label "sim"."""
    allowed = subprocess.run([*APART.split(), "true"], capture_output=True, text=True, check=False)
    if allowed.returncode:
        pytest.skip(f"no namespaces here, which root may make: {allowed.stderr.strip()}")
    folder = tmp_path_factory.mktemp("hosts")
    first, second = made = Host("first", "10.77.0.1", folder), Host("second", "10.77.0.2", folder)
    ends = f"netns {first.init} type veth peer name cable netns {second.init}"
    subprocess.run(["ip", "link", "add", "cable", *ends.split()], check=True)
    for host in made:
        inside = [
            "nsenter",
            f"--target={host.init}",
            "--net",
            "bash",
            "-ec",
            CABLE.format(address=host.address),
        ]
        subprocess.run(inside, check=True)
    told = commands()
    try:
        first.run(told["--generate"])
        token = Path(".ray") / "auth_token"
        (second.home / token).parent.mkdir()
        (second.home / token).write_bytes((first.home / token).read_bytes())
        first.run(told["--head"])
        second.run(told["--address="].replace("FIRST", first.address) + " --labels node-group=sim")
        yield made
        for host in made:
            host.run("RAY_AUTH_MODE=token ray stop")
            assert left(host, {}) == {} == host.processes()
            assert host.run("ls /dev/shm").stdout == ""
    finally:
        for host in made:
            host.outer.kill()
            host.outer.wait()
    spaces = first.spaces | second.spaces
    until = time.monotonic() + 20
    while (living := spaces & namespaces()) and time.monotonic() < until:
        time.sleep(0.2)
    assert not living


def namespaces() -> set[str]:
    """Those that some process is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/*"):
        with suppress(
            FileNotFoundError, ProcessLookupError, PermissionError
        ):  # has ended, or is not of ours
            found.add(os.readlink(entry))
    return found


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return checkpoint.open_checkpoint(run_dir).policy()


def test_the_readmes_commands_train_on_two_hosts_as_on_one(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    before = [host.processes() for host in hosts]
    line = f"{commands()['num_nodes=2'].replace('NAME', 'cartpole')} {' '.join(SMALL.split())}"
    hosts[0].run(f"{line} cluster.devices_per_node=1 run_dir=there", cwd=tmp_path)
    assert [left(host, there) for host, there in zip(hosts, before, strict=True)] == [{}, {}]
    alone = line.replace("cluster.num_nodes=2", "").replace("cluster.address=auto", "")
    hosts[0].run(f"{alone} cluster.devices_per_node=2 run_dir=here", cwd=tmp_path)
    there, here = tmp_path / "there", tmp_path / "here"
    assert "cpu 1   1     rank 1" in (there / "log.txt").read_text()
    assert rows(there) == rows(here) and len(rows(there)) == 5
    one, other = weights(there), weights(here)
    assert one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )
    assert json.loads((there / "summary.json").read_text())["updates"] == 4
    assert (there / "reports" / "step_000004" / "report.html").exists() and list(
        (there / "tensorboard").iterdir()
    )
    assert sorted(x.name for x in tmp_path.iterdir()) == ["here", "there"]


def test_roles_on_two_hosts_train_as_one_process_does(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """Simulators, experience, weights and checkpoints of another host than the driver's."""
    train = f"embodied-ppo train experiment=cartpole {' '.join(SMALL.split())}"
    apart = (
        "'cluster.component_placement={env: 1, rollout: 0, actor: 1}'"
        " 'cluster.node_groups={sim: 1}'"
    )
    joined = (
        "cluster.num_nodes=2 cluster.address=auto cluster.devices_per_node=1"
        " cluster.check_weights=true"
    )
    before = [host.processes() for host in hosts]
    hosts[0].run(f"{train} {apart} {joined} run_dir=there", cwd=tmp_path)
    assert [left(host, there) for host, there in zip(hosts, before, strict=True)] == [{}, {}]
    hosts[0].run(f"{train} run_dir=here", cwd=tmp_path)
    there, here = tmp_path / "there", tmp_path / "here"
    assert "cpu 1   1     rank 0  -        rank 0" in (there / "log.txt").read_text()
    assert rows(there) == rows(here)
    one, other = weights(there), weights(here)
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_a_run_directory_that_is_not_shared_is_refused(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    hosts[1].run(f"mount -t tmpfs tmpfs {tmp_path}")
    line = commands()["num_nodes=2"].replace("NAME", "cartpole")
    done = hosts[0].run(f"{line} cluster.devices_per_node=1 device=cpu", cwd=tmp_path, check=False)
    hosts[1].run(f"umount {tmp_path}")
    assert done.returncode == 2, done.stderr
    told = done.stderr.splitlines()[-1]
    assert (
        told.startswith(f"error: run_dir={tmp_path}/runs/cartpole/")
        and "env,rollout,actor rank" in told
    )
    assert f"does not see this machine's {tmp_path}/runs/cartpole/" in told
    assert told.endswith("; name a folder that all machines share under one path")
    assert list(tmp_path.iterdir()) == []
