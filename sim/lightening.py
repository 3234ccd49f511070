"""Fewer triangles in purely visual meshes and smaller textures: at 64x64 pixels the same picture, much cheaper."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import fast_simplification
import mujoco
import numpy as np
from PIL import Image

KEPT_FRACTION = 0.07
SMALLEST = 120
"""Meshes with fewer triangles than this are left alone, and none is decimated below it."""
LARGEST_TEXTURE = 256
"""Pixels. A cube map is uploaded six times with mipmaps: robosuite's 1450-pixel wood alone takes 67 MB per renderer."""


def decimate_visual_meshes(xml: str, model: mujoco.MjModel, folder: Path) -> str:
    """MJCF text in which every mesh that only visual geoms use points to a decimated copy in `folder`.

    model  `xml` compiled; its vertices are in the mesh's own inertial frame, `mesh_pos` and `mesh_quat` lead back to the file's
    """
    root = ElementTree.fromstring(xml)
    for element in root.findall("./asset/mesh"):
        mesh = model.mesh(element.attrib["name"]).id
        if not _is_visual(model, mesh) or model.mesh_facenum[mesh] <= SMALLEST:
            continue
        path = folder / f"{element.attrib['name']}.stl"
        write_stl(path, *_decimated(model, mesh))
        element.attrib["file"] = str(path)
        element.attrib.pop("scale", None)
    return ElementTree.tostring(root, encoding="unicode")


def shrink_textures(xml: str, folder: Path) -> str:
    """MJCF text in which every texture file wider than `LARGEST_TEXTURE` points to a smaller copy in `folder`."""
    root = ElementTree.fromstring(xml)
    for index, element in enumerate(root.findall("./asset/texture[@file]")):
        with Image.open(element.attrib["file"]) as picture:
            if max(picture.size) <= LARGEST_TEXTURE:
                continue
            path = folder / f"texture_{index}.png"
            picture.convert("RGB").resize((LARGEST_TEXTURE, LARGEST_TEXTURE), Image.Resampling.BOX).save(path)
        element.attrib["file"] = str(path)
    return ElementTree.tostring(root, encoding="unicode")


def _is_visual(model: mujoco.MjModel, mesh: int) -> bool:
    users = (model.geom_type == mujoco.mjtGeom.mjGEOM_MESH) & (model.geom_dataid == mesh)
    collides = (model.geom_contype | model.geom_conaffinity) != 0
    textured = model.mesh_texcoordadr[mesh] >= 0 and np.any(_has_texture(model, model.geom_matid[users]))
    return bool(users.any() and not collides[users].any() and not textured)


def _has_texture(model: mujoco.MjModel, materials: np.ndarray) -> np.ndarray:
    return np.array([material >= 0 and bool((model.mat_texid[material] >= 0).any()) for material in materials])


def _decimated(model: mujoco.MjModel, mesh: int) -> tuple[np.ndarray, np.ndarray]:
    """Vertices (N, 3) in the frame of the mesh file, scale applied, and triangles (M, 3)."""
    first, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
    vertices = model.mesh_vert[first : first + count].astype(np.float64)
    first, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    faces = model.mesh_face[first : first + count]
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, model.mesh_quat[mesh])
    vertices = vertices @ rotation.reshape(3, 3).T + model.mesh_pos[mesh]
    unique, index = np.unique(vertices, axis=0, return_inverse=True)
    target = max(SMALLEST, int(KEPT_FRACTION * len(faces)))
    return fast_simplification.simplify(
        unique.astype(np.float32), index.reshape(-1)[faces].astype(np.int32), target_count=target, lossless=False
    )


def write_stl(path: Path, vertices: np.ndarray, faces: np.ndarray) -> None:
    """Binary STL of a triangle mesh; degenerate triangles are dropped (MuJoCo refuses none, but they cost)."""
    corners = vertices[faces].astype(np.float32)  # (M, 3 corners, 3)
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    corners = corners[np.linalg.norm(normals, axis=1) > 0]
    records = np.zeros(len(corners), dtype=np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")]))
    records["corners"] = corners
    path.write_bytes(b"\0" * 80 + struct.pack("<I", len(corners)) + records.tobytes())
