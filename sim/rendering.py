"""Pictures of a simulation, upright RGB uint8 (height, width, 3): cheap ones for policies, full quality for videos."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np

from sim.model import CompiledModel

_COSTLY = ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_FOG", "mjRND_HAZE")
_VISUAL_GROUP = 1


class Renderer:
    """Renders any `MjData` of one model at one picture size. Owns an OpenGL context: `close` it, and never fork after.

    full=True keeps multisampling, shadows, reflections and the sky, for videos; the default leaves them out (a tenth of the
    cost).
    """

    def __init__(self, compiled: CompiledModel, size: int, full: bool = False) -> None:
        model = compiled.model
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        if not full:
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = 0
        self._model = model
        self._size = size
        self._cameras = {name: model.camera(own).id for name, own in compiled.layout.cameras.items()}
        self._context = mujoco.GLContext(size, size)
        self._context.make_current()
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + 100)
        for flag in _COSTLY:
            self._scene.flags[getattr(mujoco.mjtRndFlag, flag)] = full
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[_VISUAL_GROUP] = 1
        self._option.sitegroup[:] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._perturbation = mujoco.MjvPerturb()
        self._buffer = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._buffer)
        self._viewport = mujoco.MjrRect(0, 0, size, size)

    def render(self, data: mujoco.MjData, camera: str) -> np.ndarray:
        """(size, size, 3) uint8, a fresh array. `data` must be up to date, see `Simulation.update_pose`."""
        self._context.make_current()
        self._camera.fixedcamid = self._cameras[camera]
        category = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._option, self._perturbation, self._camera, category, self._scene)
        mujoco.mjr_render(self._viewport, self._scene, self._buffer)
        picture = np.empty((self._size, self._size, 3), dtype=np.uint8)
        mujoco.mjr_readPixels(picture, None, self._viewport, self._buffer)
        # OpenGL's first row is the lowest. This is the one place that turns pictures upright.
        return np.ascontiguousarray(picture[::-1])

    def render_all(self, data: mujoco.MjData, cameras: Sequence[str]) -> dict[str, np.ndarray]:
        """Camera name -> picture."""
        return {camera: self.render(data, camera) for camera in cameras}

    def close(self) -> None:
        """Free the OpenGL context; safe to call twice."""
        if self._context is None:
            return
        self._context.make_current()
        self._buffer.free()
        self._context.free()
        self._context = None
