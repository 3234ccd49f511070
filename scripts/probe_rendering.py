"""Draws one picture by EGL, then by OSMesa, each in its own process; exit status 0 and the name of the first that works."""

from __future__ import annotations

import os
import subprocess
import sys

BACKENDS = ("egl", "osmesa")
DRAW = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom size="1" rgba="1 0 0 1"/></worldbody></mujoco>'
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    assert renderer.render().any(), "the picture is black"
"""


def draws(backend: str) -> bool:
    """Whether this backend draws; a fresh process, since MuJoCo reads the choice once, at import."""
    environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    try:
        done = subprocess.run([sys.executable, "-c", DRAW], env=environment, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    """Probe all backends in order of preference."""
    for backend in BACKENDS:
        if draws(backend):
            print(f"rendering: {backend}", file=sys.stderr)
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
