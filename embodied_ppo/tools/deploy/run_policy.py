"""Run an exported policy: numpy and onnxruntime only.

`embodied-ppo export` copies this file into the folder of policy.onnx, policy.json and golden.npz.
It runs on Python 3.8 or newer, without torch and without embodied_ppo.

    python run_policy.py --check                        replay the recorded trace
    python run_policy.py --compare recording.npz        compare your pipeline with the trace
    python run_policy.py --mujoco [scene.xml]           run it in MuJoCo (pip install mujoco)
    python run_policy.py --loop my_robot.py             run it on a robot

    from run_policy import Policy
    policy = Policy("folder", expected_hz=50)           replays the trace first
    action = policy.act(observation)                    once in every control step
    policy.reset()                                      where the next episode starts

A recording has the arrays of golden.npz that your own pipeline gives for the trace, in the same
rows: `observation/NAME`, what your observation code computes from the recorded states (for example
`state/qpos`); `action`, what your driver receives when the recorded actions are sent to it;
`time_s`, the time of each row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

# An output with this in front of an input's name is that part of the memory after a step.
NEXT = "next_"
# Version of policy.json that `export` writes, and those that this file reads; 1 has no robot.
FORMAT, READ_FORMATS = 2, (1, 2)
RATE_TOLERANCE = 0.02  # largest relative error of the control rate
# Largest difference of a recorded dimension, as a share of its standard deviation in the trace.
TOLERANCE = 0.01
UNEXPLAINED = 0.1  # largest share of the variance that a suspected relation may leave unexplained
MAX_DELAY = 5  # longest delay that is searched for, in rows
HINTS = ((180 / np.pi, "degrees instead of radians"), (np.pi / 180, "radians instead of degrees"))
HINTS += ((1000.0, "millimetres instead of metres"), (0.001, "metres instead of millimetres"))


class BundleError(ValueError):
    """The bundle, or an input to it, differs from the export. The message names the difference."""


class ExportedPolicy:
    """An exported policy. The constructor replays the trace and refuses a difference."""

    def __init__(
        self, folder=".", *, expected_hz=None, observation_names=None, action_names=None, check=True
    ):
        """Load the bundle and check it.

        Args:
            folder: Folder of policy.onnx, policy.json and golden.npz.
            expected_hz: Rate at which the caller will call ``act``; None: not checked.
            observation_names: Names of the inputs, or of the dimensions of the only input, in the
                caller's order; None: not checked.
            action_names: Names of the action's dimensions in the caller's order (joints or
                actuators); None: not checked.
            check: Whether to replay the trace.

        Raises:
            BundleError: The message names every difference.
        """
        self.folder = Path(folder)
        self.info = self._read_info()
        specs = self.info["inputs"]
        self.inputs = {x["name"]: x for x in specs if x["role"] == "observation"}
        self.memory = {x["name"]: x for x in specs if x["role"] == "memory"}
        self.state = {}
        self.outputs = {x["name"]: x for x in self.info["outputs"]}
        self.actions = {x["name"]: x for x in self.info["outputs"] if x["role"] == "action"}
        self.golden = read_recording(self.folder / "golden.npz")
        self.session = self._open_session()
        findings = [] if expected_hz is None else self._check_rate("expected_hz", expected_hz)
        names = list(self.inputs)
        if len(names) == 1 and len(observation_names or ()) != 1:
            names = self.inputs[names[0]]["names"] or names
        findings += check_order("observation", names, observation_names)
        names = [name for spec in self.actions.values() for name in spec["names"] or []]
        findings += check_order("action", names, action_names)
        if check:
            findings += self.replay()
        if findings:
            raise BundleError("; ".join(findings))

    # ----------------------------------------------------------------------------------------- act
    def act(self, observation):
        """Return the action for an observation, in the units of ``env.step``.

        Args:
            observation: What `env.reset` returns: the array of the only input of policy.json, or a
                dictionary or tuple with one array for each, also nested ("a/b" is entry b of entry
                a, "item0" the first entry of a tuple). Numbers of any type, shapes as in
                policy.json or with a batch dimension in front, and an integer for a choice. Other
                entries are ignored. Observations are raw: policy.onnx contains the normaliser. A
                mask of choices that the simulator returns in its info is the entry "action_mask".

        Returns:
            What `env.step` receives: an array, a number for a choice, or a dictionary or tuple of
            them; with a batch dimension if the observation has one.

        A policy with memory must see every control step once; call ``reset`` where an episode
        starts.

        Raises:
            BundleError: A name, a shape, a dtype or a value is wrong, or a policy with memory gets
                another number of observations than in the step before.
        """
        arrays, batched = self._check_observation(observation)
        size = len(next(iter(arrays.values())))
        if self.memory and not self.state:
            self.state = self.initial_memory(size)
        for value in self.state.values():
            if len(value) != size:
                raise BundleError(
                    f"observation: {size} rows, and {len(value)} in the step before; the policy has"
                    " memory, so call reset() first"
                )
        outputs = self.outputs_of({**arrays, **self.state})
        self.state = {name: outputs[NEXT + name] for name in self.memory}
        return assemble(self.info.get("action_structure", "action"), outputs, batched)

    def reset(self, where=None):
        """Start new episodes; without effect for a policy without memory.

        Args:
            where: Booleans [batch], the rows whose next observation is the first of an episode;
                None: all, and the next observation may have another batch size.
        """
        if where is None:
            self.state = {}
        for value in self.state.values():
            value[np.asarray(where, dtype=bool)] = 0

    def initial_memory(self, size):
        """Return the memory at the start of ``size`` episodes: zeros."""
        return {name: np.zeros((size, *x["shape"]), x["dtype"]) for name, x in self.memory.items()}

    def outputs_of(self, arrays):
        """Return every output for batches of observations, and of the memory if there is one."""
        names = list(self.outputs)
        outputs = dict(zip(names, map(np.asarray, self.session.run(names, arrays))))
        for name, x in outputs.items():
            if not np.isfinite(x).all():
                hint = "export an earlier checkpoint"
                raise BundleError(f"{hint}: output {name!r} of policy.onnx is not finite")
        return outputs

    def outputs_of_trace(self, arrays, episode=None):
        """Return every output but the memory for the first rows of the trace.

        A policy with memory runs through each episode from its start; ``episode`` [rows] has the
        number of each row's episode, by default those of the trace.
        """
        if not self.memory:
            return self.outputs_of(arrays)
        episode, state, steps = self.golden["episode"] if episode is None else episode, {}, []
        for t in range(len(next(iter(arrays.values())))):  # rows of an episode are consecutive
            if t == 0 or episode[t] != episode[t - 1]:
                state = self.initial_memory(1)
            row = {name: x[t : t + 1] for name, x in arrays.items()}
            outputs = self.outputs_of({**row, **state})
            state = {name: outputs.pop(NEXT + name) for name in self.memory}
            steps.append(outputs)
        return {name: np.concatenate([x[name] for x in steps]) for name in steps[0]}

    def _check_observation(self, observation):
        """Return {name: array with a batch dimension}, and whether the caller has given one."""
        has_items = any(name.startswith("item0") for name in self.inputs)
        is_tuple = isinstance(observation, (tuple, list)) and has_items
        if not isinstance(observation, dict) and not is_tuple:
            if len(self.inputs) > 1:
                raise BundleError(f"observation: pass a dictionary of {', '.join(self.inputs)}")
            observation = {next(iter(self.inputs)): observation}
        arrays, sizes = {}, set()
        for name, spec in self.inputs.items():
            value = find(observation, name)
            if value is None:
                raise BundleError(f"observation {name!r}: missing")
            x, batched = read_array(name, value, spec)
            arrays[name] = x
            sizes.add(len(x) if batched else None)
        if len(sizes) > 1:
            raise BundleError("observation: its arrays have different batch sizes")
        return arrays, None not in sizes

    # --------------------------------------------------------------------------------------- checks
    def replay(self):
        """Return what differs when the recorded observations are replayed; [] if nothing does.

        The tolerance of each dimension of the outputs is in policy.json.
        """
        arrays = {name: self.golden[f"observation/{name}"] for name in self.inputs}
        outputs, findings = self.outputs_of_trace(arrays), []
        for name, spec in self.outputs.items():
            if spec["tolerance"] is None:  # a choice follows from its logits; memory shows later
                continue
            expected, actual = rows(self.golden[name]), rows(outputs[name])
            limit = np.asarray(spec["tolerance"], dtype=np.float64).reshape(-1)
            limit = np.broadcast_to(limit, expected.shape[1:])
            findings += self._differences(name, spec, expected, actual, limit)
        return findings

    def compare(self, recording, tolerance=TOLERANCE):
        """Return how a recording of the caller's pipeline differs from the trace.

        Args:
            recording: Path of an npz file, or a dictionary of arrays, with some of the arrays of
                golden.npz in the same rows, and ``time_s`` [rows]. If it has all observations, its
                actions are compared with those of the policy for these observations, so that a
                wrong observation is not reported as a wrong action.
            tolerance: Largest difference, as a share of the dimension's standard deviation.

        Returns:
            One line for each dimension that differs, with what it looks like: a swap, a sign, a
            scale, an offset, a delay, another control rate.

        Raises:
            BundleError: The file cannot be read, or the recording has none of these arrays, or
                other shapes.
        """
        given = dict(recording) if isinstance(recording, dict) else read_recording(recording)
        if {"phase", "measured_s"} <= set(given):  # a log of the robot loop
            return load_file(self.folder / "robot_loop.py").compare_log(self, given, tolerance)
        keys = {f"observation/{name}": spec for name, spec in self.inputs.items()}
        known = [*keys, *self.actions, "time_s"]
        unknown = [k for k in given if k not in known and k not in self.golden]
        if unknown or not set(given) & set(known):
            found = ", ".join(unknown or given) or "no array"
            raise BundleError(f"write some of {', '.join(known)}: the recording has {found}")
        findings = []
        if "time_s" in given:
            findings += self._check_times(given["time_s"])
        reference = self.golden
        if set(keys) <= set(given):
            arrays = {}
            for key, spec in keys.items():
                _, values = aligned(key, self.golden[key], given[key])
                arrays[spec["name"]] = np.asarray(values, spec["dtype"])
            if all(np.isfinite(x).all() for x in arrays.values()):  # others are a finding below
                reference = {**self.golden, **self.outputs_of_trace(arrays)}
        for key, spec in {**keys, **self.actions}.items():
            if key not in given:
                continue
            expected, actual = aligned(key, reference[key], given[key])
            if spec["dtype"] == "uint8":
                findings += describe_image(key, expected, actual)
                continue
            expected, actual = rows(expected), rows(actual)
            findings += self._differences(key, spec, expected, actual, limits(expected, tolerance))
        return findings

    def _differences(self, key, spec, expected, actual, limit):
        """Return the findings of an array for the first rows of the trace."""
        episode = self.golden["episode"][: len(expected)]
        return describe_differences(key, dimension_names(spec), expected, actual, limit, episode)

    def _check_rate(self, source, rate_hz):
        """Return the finding of a control rate that differs from that of the training."""
        step_s = self.info["control"]["step_s"]
        if step_s is None:
            return [f"control rate: unknown, the training's simulator has none; leave out {source}"]
        if abs(rate_hz * step_s - 1) <= RATE_TOLERANCE:
            return []
        trained = f"the policy was trained at {1 / step_s:.4g} Hz"
        return [f"control rate: {source} is {rate_hz:.4g} Hz, and {trained}"]

    def _check_times(self, times):
        """Return the finding of the control rate of recorded times, in seconds."""
        return self._check_rate("time_s", 1 / max(1e-9, float(np.median(np.diff(times)))))

    # ---------------------------------------------------------------------------------------- files
    def _read_info(self):
        """Return the content of policy.json."""
        for name in ("policy.json", "policy.onnx", "golden.npz"):
            if not (self.folder / name).is_file():
                raise BundleError(f"{self.folder}: has no {name}; copy the whole folder")
        info = json.loads((self.folder / "policy.json").read_text(encoding="utf-8"))
        if (version := info.get("format")) not in READ_FORMATS:
            raise BundleError(f"policy.json: format {version}; use the run_policy.py of its folder")
        return info

    def _open_session(self):
        """Return the session of onnxruntime, whose inputs are those of policy.json."""
        least = self.info["requires"]["onnxruntime"]
        try:  # here, so that embodied_ppo reads this file without loading onnxruntime
            import onnxruntime  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise BundleError(
                f"onnxruntime cannot be imported ({error}): pip install 'onnxruntime>={least}'"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        file, providers = str(self.folder / "policy.onnx"), ["CPUExecutionProvider"]
        try:
            session = onnxruntime.InferenceSession(file, options, providers=providers)
        except Exception as error:  # onnxruntime's own types, which share no other base class
            raise BundleError(f"copy the folder again, or update onnxruntime: {error}") from error
        for kind, nodes, specs in (
            ("input", session.get_inputs(), {**self.inputs, **self.memory}),
            ("output", session.get_outputs(), self.outputs),
        ):
            names, known = [node.name for node in nodes], list(specs)
            if names != known:
                raise BundleError(f"policy.onnx: {kind}s are {names}, and policy.json has {known}")
        return session


# Name under which programs on robots import the class.
Policy = ExportedPolicy


# ----------------------------------------------------------------------------------------- helpers
def assemble(structure, outputs, batched):
    """Return outputs in a structure of their names: dictionaries, lists (tuples) and names."""
    if isinstance(structure, dict):
        return {name: assemble(x, outputs, batched) for name, x in structure.items()}
    if isinstance(structure, list):
        return tuple(assemble(x, outputs, batched) for x in structure)
    return outputs[structure] if batched else outputs[structure][0]


def find(observation, name):
    """Return the entry "a/b" of nested dictionaries and tuples ("item0"); None if there is none."""
    if isinstance(observation, dict) and name in observation:
        return observation[name]
    first, _, last = name.partition("/")
    try:
        value = observation[int(first[4:]) if isinstance(observation, (tuple, list)) else first]
    except (IndexError, KeyError, TypeError, ValueError):
        return None
    return find(value, last) if last else value


def read_array(name, value, spec):
    """Return an observation as an input of policy.onnx, and whether it has a batch dimension."""
    try:
        x = np.asarray(value)
    except ValueError:  # rows of different lengths
        x = np.asarray(None)
    shape, dtype = tuple(spec["shape"]), np.dtype(spec["dtype"])
    if x.dtype != dtype and (dtype == np.uint8 or x.dtype.kind not in "biuf"):
        raise BundleError(f"observation {name!r}: dtype {x.dtype}; it must be {dtype}")
    # A number or choice of the simulator has no dimension; its input has one, also accepted.
    is_choice = "start" in spec and not (x.dtype.kind == "f" and x.shape == shape)
    if "raw_shape" in spec and x.ndim < 2 and (is_choice or "start" not in spec):
        shape = ()
    batched = x.ndim == len(shape) + 1
    if x.shape[int(batched) :] != shape:
        raise BundleError(f"observation {name!r}: shape {x.shape}; it must be {shape}")
    x = x if batched else x[None]
    if "start" in spec and not shape:
        choices = spec["start"] + np.arange(spec["shape"][0])
        if not np.isin(x, choices).all():
            raise BundleError(
                f"observation {name!r}: {value}; it must be a whole number from {choices[0]} to"
                f" {choices[-1]}"
            )
        x = x[:, None] == choices
    x = x.reshape(len(x), *spec["shape"])
    x = x != 0 if dtype.kind == "b" else x.astype(dtype, copy=False)
    if dtype.kind == "f" and not np.isfinite(x).all():
        names = dimension_names(spec)
        wrong = np.flatnonzero(~np.isfinite(x).all(0).reshape(-1))[:8]
        places = ", ".join(names[i] for i in wrong)
        raise BundleError(f"observation {name!r}: not finite in {places}")
    first = 0
    for choice, n in enumerate(spec.get("choices", ())):  # of a mask
        if not x[:, first : first + n].any(-1).all():
            raise BundleError(f"observation {name!r}: allows no value of choice {choice}")
        first += n
    return x, batched


def rows(x):
    """Return [rows, ..] as float64 [rows, dimensions]."""
    return np.asarray(x, dtype=np.float64).reshape(len(x), -1)


def dimension_names(spec):
    """Return one name for each dimension of an input or output, flattened."""
    if spec["names"]:
        return spec["names"]
    size = int(np.prod(spec["shape"], dtype=int))
    return [spec["name"]] if size == 1 else [f"{spec['name']}[{i}]" for i in range(size)]


def limits(expected, tolerance):
    """Return the largest difference of each dimension.

    It is ``tolerance`` standard deviations, and one thousandth of the value of a constant.
    """
    constant = np.ptp(expected, axis=0) == 0
    return np.where(constant, 1e-3 * np.abs(expected[0]), tolerance * expected.std(axis=0)) + 1e-6


def aligned(key, expected, values):
    """Return the rows of the trace that a recording has, and the recording."""
    values = np.asarray(values)
    if values.shape[1:] != expected.shape[1:] or not 2 <= len(values) <= len(expected):
        raise BundleError(
            f"{key}: the recording has shape {values.shape}; it must be {expected.shape}, or fewer"
            " of the first rows"
        )
    return expected[: len(values)], values


def check_order(kind, names, given):
    """Return the finding of names that are not those of the policy in the same order."""
    if given is None or list(given) == list(names):
        return []
    given = list(given)
    if sorted(given) != sorted(names):
        missing, unknown = set(names) - set(given), set(given) - set(names)
        return [f"{kind} names: missing {sorted(missing)}, unknown {sorted(unknown)}"]
    wrong = [f"{i} is {given[i]} instead of {x}" for i, x in enumerate(names) if given[i] != x]
    return [f"{kind} names in another order: {', '.join(wrong)}"]


def describe_differences(key, names, expected, actual, limit, episode):
    """Return a line for each dimension that differs, with what the difference looks like.

    Every dimension i that differs is compared with a·expected[j] + b for all j, by its correlation,
    and with its own values some rows earlier.

    Args:
        key: Name of the array.
        names: Names of its D dimensions.
        expected: float64 [T, D].
        actual: float64 [T, D].
        limit: Largest difference of each dimension, [D].
        episode: Number of each row's episode, [T].
    """
    if not np.isfinite(actual).all():
        wrong = np.flatnonzero(~np.isfinite(actual).all(0))
        return [f"{key}: {names[i]} is not finite" for i in wrong]
    error = np.abs(actual - expected)
    wrong = np.flatnonzero(~(error <= limit).all(0))  # a comparison with NaN is False
    x, y = expected - expected.mean(0), actual - actual.mean(0)
    norms = np.linalg.norm(y, axis=0)[:, None] * np.linalg.norm(x, axis=0)[None]
    correlation = (y.T @ x) / np.where(norms > 0, norms, np.inf)  # [D of actual, D of expected]
    source = {}
    for i in wrong:
        j = int(np.abs(correlation[i]).argmax())
        is_own = abs(correlation[i, i]) >= abs(correlation[i, j]) - 1e-6
        source[i] = i if is_own else j
    lines = []
    for i in wrong:
        j, intro = source[i], f"{key}: {names[i]} differs by up to {error[:, i].max():.3g}"
        delay = find_delay(expected[:, i], actual[:, i], limit[i], episode)
        if delay:
            relation = f"is delayed by {delay} step{'s' if delay > 1 else ''}"
        elif np.ptp(actual[:, i]) == 0 and np.ptp(expected[:, i]) > 0:
            relation = f"is constant, {actual[0, i]:.4g}"
        elif 1 - correlation[i, j] ** 2 > UNEXPLAINED:
            relation = "no dimension of the trace explains it"
        else:
            scale = float((y[:, i] @ x[:, j]) / (x[:, j] @ x[:, j]))
            offset = float(actual[:, i].mean() - scale * expected[:, j].mean())
            relation = describe_line(scale, offset, float(limit[i]), own=i == j)
            if i != j:
                kind = f"swapped with {names[j]}" if source.get(j) == i else f"is {names[j]}"
                relation = kind + (f", with {relation}" if relation else "")
        lines.append(f"{intro}: {relation or 'noise'}")
    return lines


def describe_line(scale, offset, limit, *, own):
    """Return what y = scale·x + offset is; empty where it is y = x."""
    parts = []
    if abs(scale + 1) < 0.02:
        parts.append("the opposite sign")
    elif abs(scale - 1) > 0.02 or (own and abs(offset) <= limit and abs(scale - 1) > 1e-4):
        hint = next((text for s, text in HINTS if abs(scale / s - 1) < 0.02), "")
        parts.append(f"a scale of {scale:.4g}" + (f" ({hint})" if hint else ""))
    if abs(offset) > limit:
        parts.append(f"an offset of {offset:.4g}")
    return " and ".join(parts)


def find_delay(expected, actual, limit, episode):
    """Return by how many rows ``actual`` is late within its episodes; 0: it is not just late."""
    for k in range(1, min(MAX_DELAY, len(expected) - 1) + 1):
        same_episode = episode[k:] == episode[:-k]
        shifted, late = expected[:-k][same_episode], actual[k:][same_episode]
        # A value that hardly changes agrees with any delay.
        moving = len(shifted) > 2 and np.abs(expected[k:][same_episode] - shifted).max() > 2 * limit
        if moving and np.abs(late - shifted).max() <= limit:
            return k
    return 0


def describe_image(key, expected, actual):
    """Return the finding of images whose mean difference is above 2 of 255."""
    if actual.dtype != np.uint8:
        return [f"{key}: dtype {actual.dtype}; images must be uint8, 0 to 255"]
    difference = np.abs(actual.astype(np.float64) - expected).mean()
    hint = "compare the order of channels and the orientation"
    line = f"{key}: differs by {difference:.1f} of 255 on average; {hint}"
    return [line] if difference > 2 else []


def read_recording(path):
    """Return the arrays of an npz file."""
    try:
        return dict(np.load(path))
    except FileNotFoundError:
        raise BundleError(f"{path}: does not exist") from None
    except Exception:  # numpy, zipfile and zlib raise many types for other or damaged files
        raise BundleError(f"{path}: is not a file of numpy.savez") from None


def main(arguments=None):
    """Run the command line; return the exit code: 0 no difference, 1 differences, 2 refused."""
    parser = argparse.ArgumentParser(description="Check an exported policy.")
    parser.add_argument("--folder", default=str(Path(__file__).resolve().parent))
    parser.add_argument("--check", action="store_true", help="replay the recorded trace")
    parser.add_argument("--compare", metavar="NPZ", help="compare a recording with the trace")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of --compare")
    parser.add_argument("--expected-hz", type=float, help="control rate of the caller")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--mujoco", metavar="SCENE", nargs="?", const="", help="run it in MuJoCo")
    modes.add_argument("--loop", metavar="FILE", help="run it on the robot of a file")
    parser.add_argument("--command", type=float, nargs="+", help="of --mujoco and --loop")
    parser.add_argument("--seconds", type=float, help="duration of --mujoco and --loop")
    parser.add_argument("--log", metavar="NPZ", help="log that --mujoco or --loop writes")
    parser.add_argument("--ramp", type=float, help="s to the home posture of --loop (default: 3)")
    parser.add_argument("--watchdog", type=float, help="longest time without measurements, s")
    parser.add_argument("--late-steps", type=int, help="late steps in a row that stop (default: 3)")
    args = parser.parse_args(arguments)
    names = [] if args.loop is not None else ["ramp", "watchdog", "late_steps"]
    names += ["command", "seconds", "log"] if args.loop is args.mujoco is None else []
    unused = [f"--{x.replace('_', '-')}" for x in names if getattr(args, x) is not None]
    try:
        if unused:
            raise BundleError(f"remove {' '.join(unused)}, or run a robot with --loop FILE")
        policy = ExportedPolicy(args.folder, expected_hz=args.expected_hz)
        print(f"replayed {len(policy.golden['episode'])} steps: no difference")
        findings = []
        if args.compare is not None:
            findings += policy.compare(args.compare, args.tolerance)
        if args.mujoco is not None or args.loop is not None:
            findings += load_file(policy.folder / "robot_loop.py").run(policy, args)
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in findings:
        print(line)
    if args.compare and not findings:
        print(f"{args.compare}: no difference")
    return 1 if findings else 0


def load_file(path):
    """Import a file of the bundle, or one that imports such files."""
    sys.path[:0] = {str(path.resolve().parent)} - set(sys.path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BundleError(f"{path}: write the name of a file that ends with .py")
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise BundleError(f"{path}: does not exist; bundles of format 1 have none") from None
    except Exception as error:  # of the user's own file
        raise BundleError(f"{path}: {type(error).__name__}: {error}") from error
    return module


if __name__ == "__main__":
    sys.exit(main())
