"""Which headless OpenGL this machine has, found out before MuJoCo is imported (MuJoCo cannot change its mind afterwards)."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys

PLATFORMS = ("egl", "osmesa")
PACKAGES = {
    "egl": "libegl1 libgl1 libgles2 libegl-mesa0 libgl1-mesa-dri",
    "osmesa": "libosmesa6",
}
"""Debian packages that provide each platform in software."""

_EGL_PLATFORM_DEVICE = 0x313F
_MAXIMUM_DEVICES = 10


def choose_platform() -> str:
    """Value for MUJOCO_GL: the user's own choice, else "egl" where it initialises, else "osmesa".

    ValueError when neither works, naming the packages to install.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    candidates = (wanted,) if wanted in PLATFORMS else PLATFORMS
    works = {"egl": egl_works, "osmesa": osmesa_works}
    for platform in candidates:
        if works[platform]():
            return platform
    install = " or ".join(f"`apt-get install {PACKAGES[platform]}`" for platform in candidates)
    asked = f" (MUJOCO_GL={wanted})" if wanted in PLATFORMS else ""
    raise ValueError(f"expected headless OpenGL through {' or '.join(candidates)}{asked}, got none that initialises: {install}")


def prepare() -> None:
    """Make sure that MuJoCo, imported next in this process, finds headless OpenGL; ValueError when it is too late for that."""
    if os.environ.get("MUJOCO_GL", "").lower() in PLATFORMS:
        return
    platform = choose_platform()
    if "mujoco" in sys.modules:
        raise ValueError(
            "expected MUJOCO_GL to be set before MuJoCo is imported, got an import without it: "
            f"start Python with MUJOCO_GL={platform}"
        )
    os.environ["MUJOCO_GL"] = platform


def egl_works() -> bool:
    """Whether an EGL device initialises, by the calls that MuJoCo itself makes."""
    name = ctypes.util.find_library("EGL")
    if name is None or ctypes.util.find_library("OpenGL") is None and ctypes.util.find_library("GL") is None:
        return False
    egl = ctypes.CDLL(name)
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    query_address = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    display_address = egl.eglGetProcAddress(b"eglGetPlatformDisplayEXT")
    if not query_address or not display_address:
        return False
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(query_address)
    get_display = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)(display_address)
    egl.eglInitialize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    devices, count = (ctypes.c_void_p * _MAXIMUM_DEVICES)(), ctypes.c_int(0)
    if not query(_MAXIMUM_DEVICES, devices, ctypes.byref(count)):
        return False
    for device in devices[: count.value]:
        display = get_display(_EGL_PLATFORM_DEVICE, device, None)
        # Not terminated: a process has one display per device, and MuJoCo may be using it already.
        if display and egl.eglInitialize(display, None, None):
            return True
    return False


def osmesa_works() -> bool:
    """Whether the OSMesa library is there."""
    return ctypes.util.find_library("OSMesa") is not None
