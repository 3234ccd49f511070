"""The real environment: the same results whatever the workers do, its own border checks, and nothing left behind."""

import ctypes.util
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from sim import workers
from sim.golden import golden_trajectory_hash
from sim.opengl import choose_platform
from sim.real import RealEnvironment
from tasks.starts import make_starts
from wmrl.types import Environment, Start, Status


def hash_rows(tensors):
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def play(environment, starts, decisions=5, seed=0):
    """A fixed random policy; (hash of the first pictures of each row, status, last proprioception bytes)."""
    generator = torch.Generator().manual_seed(seed)
    observation = environment.reset(starts)
    names = ("pixels/agentview", "pixels/wrist", "proprio", "objects")
    first = [hash_rows([observation[name][row] for name in names]) for row in range(len(starts))]
    for _ in range(decisions):
        step = environment.step(torch.rand(len(starts), 8, 7, generator=generator) * 2 - 1)
    return first, step.status.tolist(), step.observation["proprio"].numpy().tobytes()


def play_waves(environment, starts):
    """First-picture hashes of many starts, `width` at a time."""
    hashes = []
    for begin in range(0, len(starts), environment.width):
        hashes += play(environment, starts[begin : begin + environment.width], decisions=1)[0]
    return hashes


def test_it_is_an_environment_and_observes_what_it_promises(real):
    world: Environment = real
    assert isinstance(world, Environment) and not world.imagined and world.max_decisions == 5
    observation = real.reset(make_starts("lift_cube", "train", 3))
    shapes = {name: tuple(value.shape) for name, value in observation.items() if name != "instruction"}
    assert shapes == {
        "pixels/agentview": (3, 64, 64, 3),
        "pixels/wrist": (3, 64, 64, 3),
        "proprio": (3, 15),
        "objects": (3, 10),
        "goal": (3, 9),
        "time": (3, 1),
    }
    assert observation["instruction"] == ["lift the red cube", "lift the green cube", "lift the red cube"]
    assert observation["pixels/wrist"].dtype == torch.uint8 and observation["proprio"].dtype == torch.float32
    step = real.step(torch.zeros(3, 8, 7))
    assert torch.allclose(step.observation["time"], torch.full((3, 1), 8 / 40))
    assert step.alive.tolist() == [1.0] * 3 and step.status.tolist() == [0] * 3
    assert (step.seconds > 0.01).all() and real.control_steps == (8, 8, 8)


def test_results_do_not_depend_on_workers_width_order_or_repetition(task, real):
    """Pain reports D03 and D06: ten starts give ten scenes, the same ones whatever the parallelism."""
    starts = make_starts(task, "train", 10, offset=20)
    hashes = play_waves(real, starts)
    assert len(set(hashes)) == 10
    assert play_waves(real, starts) == hashes
    assert play_waves(real, starts[::-1]) == hashes[::-1]
    outcome = play(real, starts[:4])
    with RealEnvironment(task, width=10, num_workers=4) as other:
        assert play_waves(other, starts) == hashes
        assert play(other, starts[:4]) == outcome


def test_one_worker_gives_the_same_leaves_no_process_when_closed_and_can_be_used_again(task, real):
    starts = make_starts(task, "train", 5, offset=20)
    outcome, hashes = play(real, starts[:4]), play_waves(real, starts)
    environment = RealEnvironment(task, width=5, num_workers=1)
    assert play(environment, starts[:4]) == outcome
    pid = environment.worker_pids()[0]
    environment.close()
    environment.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert play_waves(environment, starts) == hashes
    environment.close()


def test_killed_worker_costs_nothing_but_time(real, caplog):
    starts = make_starts("lift_cube", "train", 4, offset=40)
    undisturbed = play(real, starts)
    generator = torch.Generator().manual_seed(0)
    before = real.num_restarts
    with caplog.at_level(logging.WARNING):
        real.reset(starts)
        for decision in range(5):
            if decision in (2, 4):
                os.kill(real.worker_pids()[1], signal.SIGKILL)
            step = real.step(torch.rand(4, 8, 7, generator=generator) * 2 - 1)
    assert step.status.tolist() == undisturbed[1]
    assert step.observation["proprio"].numpy().tobytes() == undisturbed[2]
    assert real.num_restarts == before + 2
    assert "simulator 1" in caplog.text and "died with exit code -9" in caplog.text


def test_hung_worker_is_replaced(task, real, caplog):
    starts = make_starts(task, "train", 2)
    undisturbed = play(real, starts, decisions=2)
    with RealEnvironment(task, width=2, num_workers=1, timeout_seconds=2.0) as environment:
        generator = torch.Generator().manual_seed(0)
        environment.reset(starts)
        environment.step(torch.rand(2, 8, 7, generator=generator) * 2 - 1)
        hung = environment.worker_pids()[0]
        os.kill(hung, signal.SIGSTOP)
        step = environment.step(torch.rand(2, 8, 7, generator=generator) * 2 - 1)
        assert step.observation["proprio"].numpy().tobytes() == undisturbed[2]
        assert "simulator 0" in caplog.text and "gave no answer for 2 s" in caplog.text
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)


def test_worker_that_keeps_dying_gives_up_its_rows_as_infrastructure(real, monkeypatch, caplog):
    starts = make_starts("lift_cube", "train", 2)
    real.reset(starts)
    start_process = subprocess.Popen

    def broken(command, **options):
        return start_process([sys.executable, "-c", "raise SystemExit(3)"], **options)

    monkeypatch.setattr(workers.subprocess, "Popen", broken)
    os.kill(real.worker_pids()[0], signal.SIGKILL)
    step = real.step(torch.zeros(2, 8, 7))
    assert step.status.tolist() == [Status.INFRASTRUCTURE, Status.RUNNING]
    assert step.reward.tolist() == [0.0, 0.0] and step.alive.tolist() == [0.0, 1.0]
    assert "died with exit code 3 for the 3. time: giving up its rows" in caplog.text
    monkeypatch.undo()
    assert play(real, starts, decisions=1)[1] == [0, 0]


def test_finished_rows_are_not_simulated_further(real, stage):
    from sim.environment import RobotTask
    from sim.lifting import LiftExpert
    from sim.playing import plan_chunk

    start = make_starts("lift_cube", "train", 1)[0]
    local = RobotTask("lift_cube", stage=stage)
    local.reset(seed=start.seed)
    expert = LiftExpert(local.simulation, "red")
    chunks: list[np.ndarray] = []
    while not chunks or not local.step(chunks[-1])[2]:
        chunks.append(plan_chunk(local, expert))
    real.reset([start, make_starts("lift_cube", "train", 2)[1]])
    rewards, steps = [], []
    for decision in range(5):
        chunk = torch.zeros(2, 8, 7)
        if decision < len(chunks):
            chunk[0] = torch.from_numpy(chunks[decision])
        steps.append(real.step(chunk))
        rewards.append(steps[-1].reward.tolist())
    ended = len(chunks) - 1
    assert [r[0] for r in rewards] == [1.0 if i == ended else 0.0 for i in range(5)]
    assert all(
        s.status[0] == Status.SUCCESS and s.alive[0] == 0.0 and (i == ended or s.seconds[0] == 0.0)
        for i, s in enumerate(steps)
        if i >= ended
    )
    kept = [s.observation["pixels/wrist"][0] for s in steps[ended:]]
    assert all(torch.equal(kept[0], k) for k in kept)
    assert steps[-1].status[1] == Status.TIME_LIMIT


def test_each_row_gets_its_own_instruction(real):
    """Pain report D04: the goal follows the row's own text."""
    texts = ["lift the green cube", "lift the red cube", "lift the green cube"]
    starts = [Start("lift_cube", seed, text) for seed, text in enumerate(texts)]
    assert real.reset(starts)["instruction"] == texts


def test_recorded_frames_show_every_control_step(real):
    starts = make_starts("lift_cube", "train", 2)
    real.record_frames([1], size=96)
    real.reset(starts)
    for _ in range(2):
        real.step(torch.zeros(2, 8, 7))
    frames = real.frames()
    real.record_frames([])
    assert list(frames) == [1] and frames[1].shape == (17, 96, 96, 3) and frames[1].dtype == np.uint8
    assert frames[1].std() > 10 and not np.array_equal(frames[1][0], frames[1][-1])
    real.reset(starts)
    assert real.frames() == {}


def test_bad_input_is_refused_before_any_simulation(real):
    with pytest.raises(ValueError, match="did you mean 'lift_cube'"):
        RealEnvironment("lift_cub")
    with pytest.raises(ValueError, match="expected a chunk of 1 to 40 control steps"):
        RealEnvironment(chunk=65)
    with pytest.raises(ValueError, match="expected num_workers of at least 1, got 0"):
        RealEnvironment(num_workers=0)
    with pytest.raises(ValueError, match="expected a camera .* did you mean 'wrist'"):
        real.record_frames([0], camera="wirst")
    with pytest.raises(ValueError, match="expected rows of 0 to 3, got .4."):
        real.record_frames([4])
    with pytest.raises(ValueError, match="1 to 4 starts"):
        real.reset(make_starts("lift_cube", "train", 5))
    with pytest.raises(ValueError, match="1 to 4 starts"):
        real.reset([])
    with pytest.raises(ValueError, match="starts of task 'lift_cube', got one of 'lift_single'"):
        real.reset(make_starts("lift_single", "train", 1))
    with pytest.raises(ValueError, match="without variant and snapshot"):
        real.reset([Start("lift_cube", 1, "lift the red cube", variant="light")])
    with pytest.raises(ValueError, match="expected an instruction out of"):
        real.reset([Start("lift_cube", 1, "")])


def test_nan_action_names_row_and_dimension_and_changes_nothing(real):
    starts = make_starts("lift_cube", "train", 2)
    undisturbed = play(real, starts, decisions=1)
    real.reset(starts)
    actions = torch.zeros(2, 8, 7)
    actions[1, 2, 6] = float("nan")
    with pytest.raises(ValueError, match=r"got nan in row 1, control step 2, dimension 6 \(gripper\)"):
        real.step(actions)
    assert play(real, starts, decisions=1) == undisturbed


def test_clipped_actions_are_counted(real):
    real.reset(make_starts("lift_cube", "train", 2))
    before = real.clipped_actions
    actions = torch.zeros(2, 8, 7)
    actions[0, 0, 0], actions[1, 7, 3] = 1e9, -1.5
    real.step(actions)
    assert real.clipped_actions == before + 2


def test_without_opengl_the_error_names_the_packages(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(ValueError, match="apt-get install libegl1 .*libgl1-mesa-dri` or `apt-get install libosmesa6"):
        RealEnvironment("lift_cube")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(ValueError, match=r"through osmesa \(MUJOCO_GL=osmesa\)"):
        choose_platform()


@pytest.mark.parametrize("unread", [0, 1])
def test_workers_end_quietly_when_their_parent_is_killed(task, unread):
    code = (
        "import os, sys, time; from sim.workers import WorkerPool; from tasks.task import get_task\n"
        "pool = WorkerPool(1, (get_task('lift_cube'), 8, 64), 60.0)\n"
        "print(pool.exchange({0: [('ping', {})]})[0][0], flush=True)\n"
        f"for _ in range({unread}): pool._workers[0].connection.send(('ping', {{}})); time.sleep(0.5)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stderr == ""
    pid, deadline = int(done.stdout), time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"worker {pid} outlived its parent")


def test_workers_import_neither_torch_nor_robosuite(real):
    real.reset(make_starts("lift_cube", "train", 2))
    for pid in real.worker_pids():
        with open(f"/proc/{pid}/maps") as maps:
            text = maps.read()
        assert "libmujoco" in text and "libtorch" not in text


def test_golden_trajectory_hash_repeats(real):
    first = golden_trajectory_hash("lift_cube")
    assert len(first) == 25 and first == real.run_jobs("golden", [{}])[0] == real.run_jobs("golden", [{}, {}])[1]
