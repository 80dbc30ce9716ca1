"""The page of ``embodied-ppo play``: the robot in 3D with controls, served by viser."""

from __future__ import annotations

import contextlib
import functools
import html
import io
import queue
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import viser
from viser._messages import RunJavascriptMessage

from embodied_envs.base.errors import CheckpointError, EnvError, one_line
from embodied_envs.physics.cameras import Cameras
from embodied_envs.robots.observation_parts import COMMAND_UNITS
from embodied_ppo.core.errors import UsageError
from embodied_ppo.evaluation.video import RenderProcess, render_poses
from embodied_ppo.tools.play_scene import Scene
from embodied_ppo.tools.play_sources import Weights
from embodied_ppo.tools.player import AGENTS, Player, Pull

HOST = "127.0.0.1"
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Intervals of pictures, of numbers and bars, and of looking for a new checkpoint, seconds.
DRAW_S, PANEL_S, CHECKPOINT_S = 1 / 30, 0.2, 2.0
VIDEO_SIZE = (720, 1280)  # (height, width) of exported videos, pixels
VIDEO_FPS = 30
SPEEDS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0, "2": 2.0}
# Axis of a gamepad that sets each command, in their order: forward and to the left by the left
# stick, turning by the right one. Up and left are negative.
AXES = (1, 0, 2, 3)
# Writes the axes of the first gamepad into the field "Gamepad", as if a user wrote them; the
# library sends no other events of a browser.
GAMEPAD = (Path(__file__).parent / "templates" / "gamepad.js").read_text(encoding="utf-8")
PUSHES = {"forward": (1.0, 0.0), "back": (-1.0, 0.0), "left": (0.0, 1.0), "right": (0.0, -1.0)}


class Page:
    """A page that shows a player. All browsers see and control the same robot.

    The library calls the functions of the controls in threads of its own. They put what the user
    wants into a queue, which the loop reads between two steps.
    """

    def __init__(
        self,
        player: Player,
        *,
        title: str,
        video_dir: Path,
        port: int = 0,
        weights: Weights | None = None,
        episodes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start the server; at the end the complete page can be loaded from ``address``.

        Args:
            player: The world to show.
            title: Title of the page.
            video_dir: Folder of exported videos.
            port: Port of the page; 0 selects a free one.
            weights: Checkpoints that the policy follows.
            episodes: Rows ``episodes`` of the report.json whose episodes can be replayed.

        Raises:
            UsageError: The port cannot be used.
        """
        self.player, self.title, self.video_dir = player, title, video_dir
        self._weights, self._episodes = weights, {int(row["index"]): row for row in episodes}
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._export: tuple[RenderProcess, tempfile.TemporaryDirectory[str], Path] | None = None
        self._message, self._largest = "", 1e-6
        with contextlib.redirect_stdout(io.StringIO()):  # the library prints a box
            self._server = viser.ViserServer(HOST, _free_port(port), label=title, verbose=False)
        self.address = f"http://{HOST}:{self._server.get_port()}/"
        # Its share button would publish the page on the internet.
        self._server.gui.configure_theme(show_share_button=False, show_logo=False)
        self._scene = Scene(self._server, player, self._pull)
        self._add_controls()
        self._scene.draw(player.frames[player.shown])
        self._update_panel()
        # The first request of the page compresses it, which takes seconds on a busy computer.
        request = urllib.request.Request(self.address, headers={"Accept-Encoding": "gzip"})
        with contextlib.suppress(OSError), NO_PROXY.open(request, timeout=60) as response:
            response.read()

    # ------------------------------------------------------------------------------------- the loop
    def serve(self) -> None:
        """Simulate in real time while a browser shows the page, until KeyboardInterrupt."""
        scene, player = self._scene, self.player
        jobs: dict[Callable[[], None], float] = {
            self._look_for_changes: CHECKPOINT_S,
            lambda: scene.draw(player.frames[player.shown]): DRAW_S,
            self._update_panel: PANEL_S,
        }
        last = dict.fromkeys(jobs, 0.0)
        try:
            while True:
                while not self._events.empty():
                    self._attempt(self._events.get())
                now = time.monotonic()
                steps = self.player.due(now)
                if not self._server.get_clients():  # the page is closed: the robot waits
                    time.sleep(0.05)
                    steps = 0
                for _ in range(steps):
                    self._attempt(self.player.advance)
                for job, interval_s in jobs.items():
                    if now - last[job] >= interval_s:
                        last[job] = now
                        self._attempt(job)
                time.sleep(max(0.001, min(0.01, self.player.step_s / self.player.speed / 2)))
        finally:
            self.close()

    def close(self) -> None:
        """Stop the server and an export in progress."""
        if self._export is not None:
            self._export[0].stop()
            self._export[1].cleanup()
            self._export = None
        with contextlib.redirect_stdout(io.StringIO()):
            self._server.stop()

    def _attempt(self, action: Callable[[], Any]) -> None:
        """Call a function; an error of policy, simulator or files pauses and is shown."""
        try:
            action()
        except (CheckpointError, EnvError, OSError) as error:
            self.player.paused = True
            self._message = f"paused: {one_line(error)}"

    def _look_for_changes(self) -> None:
        """Load a new checkpoint; finish an export."""
        if self._weights is not None:
            self._message = self._weights.update() or self._message
        if self._export is None:
            return
        process, folder, path = self._export
        reason = process.wait(0)
        if reason is None:
            self._message = "rendering the video"
            return
        self._export = None
        self._save_button.disabled = False
        self._message = f"no video: {reason}"
        if not reason:
            Path(folder.name, "video.mp4").replace(path)
            self._message = f"saved {path}"
            self._server.send_file_download(path.name, path.read_bytes())
        folder.cleanup()

    # ------------------------------------------------------------------------------------- controls
    def _on_change(self, handle: Any, action: Callable[[Any], None]) -> None:
        """Call ``action`` with the new value when a user, not the program, changes a control."""

        @handle.on_update
        def _(event: Any) -> None:
            if event.client is not None:
                self._events.put(functools.partial(action, event.target.value))

    def _on_click(self, handle: Any, action: Callable[..., None]) -> None:
        """Call ``action`` when a user clicks a button."""

        @handle.on_click
        def _(_: Any) -> None:
            self._events.put(action)

    def _add_controls(self) -> None:
        """Add all controls of the panel."""
        gui, player = self._server.gui, self.player
        self._status = gui.add_html("")
        self._pause_button = gui.add_button("Pause")
        self._on_click(self._pause_button, self._toggle_pause)
        reset = gui.add_button("Next episode", hint="Start the next episode of the evaluation")
        self._on_click(reset, player.reset)
        speed = gui.add_dropdown("Speed", tuple(SPEEDS), initial_value="1")
        self._on_change(speed, lambda name: setattr(player, "speed", SPEEDS[name]))
        agents = AGENTS if player.policy is not None else AGENTS[1:]
        agent = gui.add_dropdown("Agent", agents, initial_value=player.agent)
        self._on_change(agent, lambda name: setattr(player, "agent", name))
        gui.add_markdown("Drag the robot with the left mouse button to pull it.")
        self._add_commands()
        if player.base is not None:
            with gui.add_folder("Push"):
                size = gui.add_slider("Size (m/s)", 0.1, 3.0, 0.1, 1.0)
                buttons = gui.add_button_group("Direction", tuple(PUSHES))
                self._on_click(buttons, lambda: self._push(buttons.value, size.value))
        with gui.add_folder("Reward of a step"):
            self._bars = gui.add_html("")
        self._add_replay()
        with gui.add_folder("Video"):
            self._seconds = gui.add_number("Last seconds", 10.0, min=1.0, max=60.0, step=1.0)
            self._save_button = gui.add_button("Save as mp4 (720p)")
            self._on_click(self._save_button, self._save_video)

    def _add_commands(self) -> None:
        """Add one slider per command of the task."""
        gui, player = self._server.gui, self.player
        self._sliders: list[Any] = []
        if not player.commands:
            return
        with gui.add_folder("Commands"):
            hint = "Hold these commands instead of those of the task"
            self._drive = gui.add_checkbox("Drive", False, hint=hint)
            self._on_change(self._drive, self._set_drive)
            for name, (low, high) in player.commands.items():
                unit = f" ({COMMAND_UNITS[name]})" if name in COMMAND_UNITS else ""
                low, high = (low, high) if low < high else (low - 1.0, high + 1.0)
                step = (high - low) / 200
                slider = gui.add_slider(f"{name}{unit}", low, high, step, max(low, min(high, 0.0)))
                self._on_change(slider, functools.partial(self._set_command, slider))
                self._sliders.append(slider)
            hint = "Sets the commands once a button is pressed"
            self._on_change(gui.add_text("Gamepad", "axes", hint=hint), self._read_gamepad)
            gui._websock_interface.queue_message(RunJavascriptMessage(GAMEPAD))
            gui.add_markdown("Arrows: command blue, velocity green.")
            self._on_click(gui.add_button("Zero"), self._zero_command)

    def _add_replay(self) -> None:
        """Add the controls of replays: the episode and the position in it."""
        gui = self._server.gui
        with gui.add_folder("Replay an episode of the evaluation"):
            most = max(self._episodes, default=65_535)
            number = gui.add_number("Episode", 0, min=0, max=most, step=1)
            self._on_click(gui.add_button("Replay"), lambda: self._replay(int(number.value)))
            self._position = gui.add_slider("Step", 0, 1, 1, 0)
            self._on_change(self._position, self._seek)

    def _toggle_pause(self) -> None:
        player = self.player
        player.paused, self._message = not player.paused, ""
        if player.cursor is not None and player.shown == len(player.frames) - 1:
            player.cursor = 0  # the replay starts again

    def _set_drive(self, drives: bool) -> None:
        """Hold the commands of the sliders, or leave them to the task."""
        self._drive.value = drives
        self.player.held = [slider.value for slider in self._sliders] if drives else None

    def _set_command(self, slider: Any, value: float) -> None:
        """Hold the command that a user has set, and the others as they are."""
        slider.value = value  # the panel may have shown the task's command in the meantime
        self._set_drive(True)

    def _read_gamepad(self, text: str) -> None:
        """Hold the commands that a gamepad's axes set; 0 if it was removed."""
        try:
            axes = [float(x) for x in text.split()[1:]]
        except ValueError:  # written by a user
            return
        for slider, axis in zip(self._sliders, AXES, strict=False):
            x = -axes[axis] if axis < len(axes) else 0.0
            zero = max(slider.min, min(slider.max, 0.0))
            slider.value = zero + abs(x) * ((slider.max if x > 0 else slider.min) - zero)
        self._set_drive(True)

    def _zero_command(self) -> None:
        """Hold the commands that are nearest to 0."""
        for slider in self._sliders:
            slider.value = max(slider.min, min(slider.max, 0.0))
        self._set_drive(True)

    def _push(self, direction: str, size: float) -> None:
        """Push the robot in a direction of its base."""
        forward, left = PUSHES[direction]
        data = self.player.positions(self.player.frames[-1])
        x, y = data.xmat[self.player.base].reshape(3, 3)[:2, 0]
        heading = np.hypot(x, y) or 1.0
        x, y = size * x / heading, size * y / heading
        self.player.push((forward * x - left * y, forward * y + left * x, 0.0))

    def _pull(self, pull: Pull | None) -> None:
        """Start, change or end a pull by the mouse."""
        self._events.put(lambda: setattr(self.player, "pull", pull))

    def _replay(self, number: int) -> None:
        """Simulate an episode of the evaluation, compare it with the report, and show it."""
        self._message = f"replay of episode {number}"
        result, player = self.player.replay(number), self.player
        player.paused = False
        self._position.max = max(1, len(player.frames) - 1)
        self._message += f": {result.steps} steps, return {result.return_:.6g}"
        if number in self._episodes:
            row = self._episodes[number]
            same = (row["initial_state"], row["length"]) == (result.initial_state, result.steps)
            same = same and abs(row["return"] - result.return_) <= 1e-6 * abs(row["return"])
            report = f"report: {row['length']} steps, return {row['return']:.6g}"
            self._message += ", equal to the report" if same else f"; it differs from the {report}"

    def _seek(self, step: int) -> None:
        """Show a step of the replay and pause."""
        if self.player.cursor is not None:
            self.player.cursor = min(step, len(self.player.frames) - 1)
            self.player.paused = True

    def _save_video(self) -> None:
        """Start to render the last seconds before the shown step in a process of its own."""
        if self._export is not None:  # two clicks, or clicks in two browsers
            return
        player = self.player
        frames = list(player.frames)[: player.shown + 1]
        frames = frames[-max(1, round(self._seconds.value / player.step_s)) :]
        stride = max(1, round(1 / (VIDEO_FPS * player.step_s)))
        poses = [frame.pose for frame in frames[::stride]]
        path = self.video_dir / f"play-{time.strftime('%Y%m%d-%H%M%S')}.mp4"
        self.video_dir.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that a rename does not copy.
        folder = tempfile.TemporaryDirectory(prefix=".play-", dir=self.video_dir)
        fps = 1 / (stride * player.step_s)
        cameras = functools.partial(Cameras, player.model, render_size=VIDEO_SIZE)
        process = RenderProcess(
            functools.partial(render_poses, cameras, poses, fps, folder.name), Path(folder.name)
        )
        self._export, self._save_button.disabled = (process, folder, path), True

    # -------------------------------------------------------------------------------------- numbers
    def _update_panel(self) -> None:
        """Show the state of the run, the reward terms and the command."""
        player = self.player
        frame = player.frames[player.shown]
        self._pause_button.label = "Resume" if player.paused else "Pause"
        checkpoint = "" if self._weights is None else f"{self._weights.source.path.name}, "
        where = f"episode {player.episode}, step {player.steps}"
        if player.cursor is not None:
            self._position.value = player.cursor
            where = f"replay of episode {player.episode}, step {player.cursor}"
        lines = [f"{checkpoint}{where}", player.ended, self._message]
        text = "<br>".join(html.escape(line) for line in lines if line)
        self._set_html(self._status, f'<div style="padding:0 1em;font-size:.85em">{text}</div>')
        self._set_html(self._bars, self._bars_html(player.mean_terms(PANEL_S)))
        if self.player.held is None:
            for slider, value in zip(self._sliders, frame.command, strict=False):
                slider.value = round(float(np.clip(value, slider.min, slider.max)), 2)

    def _set_html(self, handle: Any, content: str) -> None:
        if handle.content != content:
            handle.content = content

    def _bars_html(self, terms: Mapping[str, float]) -> str:
        """Return a bar for each term; the longest bar so far has the full width."""
        self._largest = max([self._largest, *(abs(x) for x in terms.values() if np.isfinite(x))])
        rows = []
        for name, value in terms.items():
            width = 50 * min(1.0, abs(value) / self._largest) if np.isfinite(value) else 0.0
            color, left = ("#2b8a3e", 50.0) if value >= 0 else ("#c92a2a", 50.0 - width)
            rows.append(
                f'<div style="overflow:hidden">{html.escape(name)}</div>'
                '<div style="background:#8882;position:relative;height:1em;margin-top:.2em">'
                f'<div style="position:absolute;left:{left:.1f}%;width:{width:.1f}%;height:100%;'
                f'background:{color}"></div></div>'
                f'<div style="text-align:right">{value:.3f}</div>'
            )
        style = "display:grid;grid-template-columns:9.5em 1fr 4em;gap:0 .5em;padding:0 1em;"
        return f'<div style="{style}font-size:.75em;line-height:1.5">{"".join(rows)}</div>'


def _free_port(port: int) -> int:
    """Return a port that can be used, because viser would silently take the next one.

    Raises:
        UsageError: It cannot be used.
    """
    try:
        with socket.create_server((HOST, port)) as probe:
            return probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--port {port}: cannot be used ({one_line(error)}); name another port, or remove it"
            " for a free one"
        ) from error
