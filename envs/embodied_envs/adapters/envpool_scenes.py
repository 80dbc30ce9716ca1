"""Model files of EnvPool for images: floors without end, no shadows; physics as in EnvPool's."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Family -> folder of its models below base_path/mujoco.
FAMILIES = {"envpool.mujoco.gym": "assets_gym", "envpool.mujoco.dmc": "assets_dmc"}

# Half size of a horizontal plane from which on it is a floor.
LEAST_FLOOR_M = 2.0
# First part of the id -> seconds of a step, of classic control and Box2D.
CONTROL_STEP_S = {
    **{"Acrobot": 0.2, "CartPole": 0.02, "Pendulum": 0.05},
    **dict.fromkeys(("BipedalWalker", "CarRacing", "LunarLander"), 0.02),
}


def step_s(id: str, family: str, config: Mapping[str, object]) -> float | None:
    """Return the simulated seconds of a step of an EnvPool task; None if unknown.

    Args:
        id: Task id.
        family: Python package of its simulator.
        config: EnvPool's options of the task.
    """
    frame_skip = float(config.get("frame_skip") or 1)  # pyright: ignore[reportArgumentType]
    if "ctrl_dt" in config:
        return float(config["ctrl_dt"])  # pyright: ignore[reportArgumentType]
    match family:
        case "envpool.atari":
            return frame_skip / 60
        case "envpool.mujoco.gym" | "envpool.mujoco.dmc":
            folder = Path(str(config["base_path"]), "mujoco", FAMILIES[family])
            model = folder / str(config.get("xml_file") or _domain_file(folder, id))
            processed = model.with_stem(f"{model.stem}_envpool")  # by EnvPool
            file = next((f for f in (model, processed) if f.exists()), None)
            if file is None:
                return None
            stated = re.search(r'timestep\s*=\s*"([^"]+)"', file.read_text())
            return frame_skip * (float(stated[1]) if stated else 0.002)
        case "envpool.mujoco.metaworld" | "envpool.mujoco.robotics":
            return frame_skip * (0.0025 if family.endswith("metaworld") else 0.002)
        case "envpool.classic_control" | "envpool.box2d":
            name = id.rpartition("/")[2]
            return next((x for task, x in CONTROL_STEP_S.items() if name.startswith(task)), None)
    return None


def _domain_file(folder: Path, id: str) -> str:
    """Return the model of a task of dm_control: point_mass.xml for PointMassEasy-v1."""
    name = id.rpartition("/")[2].lower()
    files = [f for f in folder.glob("*.xml") if name.startswith(f.stem.replace("_", "").lower())]
    return max((f.name for f in files), key=len, default="unknown.xml")


def write(base_path: str, family: str) -> tempfile.TemporaryDirectory[str]:
    """Return a copy of a family's models for images, as another base_path of EnvPool.

    Files other than models are links.
    """
    directory = tempfile.TemporaryDirectory(prefix="embodied_scenes")
    source, copy, family_folder = Path(base_path), Path(directory.name), FAMILIES[family]
    for folder, changed in ((Path(), "mujoco"), (Path("mujoco"), family_folder)):
        (copy / folder).mkdir(exist_ok=True)
        for entry in (source / folder).iterdir():
            if entry.name != changed:
                (copy / folder / entry.name).symlink_to(entry)
    models = source / "mujoco" / family_folder
    for entry in (models, *sorted(models.rglob("*"))):  # parents come first
        target = copy / entry.relative_to(source)
        if entry.is_dir():
            target.mkdir()
        elif entry.suffix == ".xml":
            target.write_text(for_images(entry.read_text()))
        else:
            target.symlink_to(entry)
    return directory


def for_images(mjcf: str) -> str:
    """Return a model whose floors have no end, without shadows, reflections and multisampling.

    Collisions with a plane do not depend on its size. Rays do: models with range finders keep it.
    """
    if "<rangefinder" not in mjcf:
        for geom in re.findall(r"<geom\b[^>]*>", mjcf):
            size = re.search(r'\bsize\s*=\s*"\s*(\S+)\s+(\S+)\s+(\S+?)\s*"', geom)
            geom_text = re.sub(r'\bzaxis\s*=\s*"0 0 1"', "", geom)
            is_level = not re.search(r"\b(zaxis|euler|quat|xyaxes|axisangle|fromto)\b", geom_text)
            is_plane = re.search(r'\btype\s*=\s*"plane"', geom)
            if size is None or not is_plane or not is_level:
                continue
            x, y = float(size[1]), float(size[2])
            if max(x, y) < LEAST_FLOOR_M or min(x, y) <= 0:
                continue
            mjcf = mjcf.replace(geom, geom.replace(size[0], f'size="0 0 {size[3]}"'))
            if name := re.search(r'\bmaterial\s*=\s*"([^"]+)"', geom):
                mjcf = re.sub(
                    rf'<material\b[^>]*\bname\s*=\s*"{re.escape(name[1])}"[^>]*>',
                    lambda m, x=x, y=y: _repeat_per_metre(m[0], 2 * x, 2 * y),
                    mjcf,
                )
    mjcf = re.sub(r'\b(reflectance)\s*=\s*"[^"]*"', r'\1="0"', mjcf)
    mjcf = re.sub(r'\bcastshadow\s*=\s*"[^"]*"', "", mjcf)
    mjcf = re.sub(r"<light\b", '<light castshadow="false"', mjcf)
    quality = '<visual><quality shadowsize="0" offsamples="0"/></visual>'
    return mjcf.replace("</mujoco>", f"{quality}</mujoco>")


def _repeat_per_metre(material: str, width: float, height: float) -> str:
    """Return a material whose texture repeats as on a plane of this size, m."""
    repeat = re.search(r'\btexrepeat\s*=\s*"\s*(\S+)\s+(\S+)\s*"', material)
    if repeat is None or re.search(r'\btexuniform\s*=\s*"true"', material):
        return material
    x, y = float(repeat[1]) / width, float(repeat[2]) / height
    return material.replace(repeat[0], f'texrepeat="{x:g} {y:g}" texuniform="true"')
