"""Stage 3: roll out the base policy, fit the first world model, examine it before any imagined update (`wmrl-world-model`)."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from sim.environment import observation_space
from sim.experts import perturbed_rollouts
from tasks.task import get_task
from vla.config import RunConfig
from vla.encoded import Beginnings
from vla.policy import ENCODED, ChunkPolicy
from vla.session import Session, run_in_session
from wmrl.buffer import Buffer
from wmrl.collect import collect, expand
from wmrl.correction import Correction
from wmrl.files import read_json, write_json
from wmrl.keyframes import Keyframes, branches
from wmrl.noise import derive_seed
from wmrl.objective import Objective
from wmrl.progress import Progress, note, stage
from wmrl.proposal import relative_change
from wmrl.state_files import load_rollouts, load_state, save_rollouts, save_state, without_inputs
from wmrl.types import Rollouts, concatenate
from world_model.exam import Exam, Fold, cross_fit, merge
from world_model.latent import LatentWorldModel, Transitions

FRAMES = ("pixels/agentview", "pixels/wrist")
PLANNING = "perturbed demonstrations, looking ahead"


def run(session: Session) -> None:
    """Collect, fit, examine; what is already in the folder is not made again."""
    config, folder = session.config, session.world_model
    if config.base is not None:
        load_rollouts(folder / "base.safetensors")
        return
    with stage("world model: rollouts of the base policy, first fit, exam"):
        base = base_rollouts(session)
        if not config.train.correction.mode == "real" and not (folder / "exam.json").exists():
            perturbed = perturbed_demonstrations(session)
            policy = session.base_policy()
            with session.ledger.phase("exam"):
                exam, evidence = examine_cross_fitted(session, policy, base, perturbed)
            with session.ledger.phase("fit"):
                model = build_model(config, policy, session_beginnings(session, policy))
                losses = model.fit(concatenate([base, perturbed]), seed=derive_seed(config.seed, "first fit"))
            note(f"fitted on {int(losses['transitions'])} chunks in {int(losses['fit_steps'])} steps")
            save_state(folder / "model.safetensors", model.state_dict())
            save_rollouts(folder / "exam_real.safetensors", evidence.real)
            save_rollouts(folder / "exam_twin.safetensors", evidence.twin)
            save_state(folder / "exam_updates.safetensors", {"change": evidence.change})
            write_json(folder / "exam.json", asdict(exam))
        if (folder / "exam.json").exists():
            for line in read_exam(session).lines():
                note(line)
        session.save_ledger()


def base_rollouts(session: Session) -> Rollouts:
    """Groups of rollouts of the base policy on training starts: the first real experience of every arm."""
    config, path = session.config, session.world_model / "base.safetensors"
    if not path.exists():
        policy = session.base_policy()
        starts, members = expand(
            session.starts("base rollouts", config.world_model.base_groups), config.train.correction.group_size
        )
        record = (*FRAMES, *config.recorded)
        with session.ledger.phase("base rollouts"), Progress("base rollouts", len(starts), unit="rollout") as progress:
            rollouts = collect(
                session.encoded(policy),
                policy,
                starts,
                members,
                seed=base_seed(config),
                record=record,
                on_wave=progress.update,
            )
        save_rollouts(path, rollouts)
    rollouts = load_rollouts(path)
    session.book_once("base rollouts", rollouts)
    note(f"base policy, sampled: {rollouts.returns().mean():.2f} success on {len(rollouts)} training rollouts")
    return without_inputs(rollouts, FRAMES)


def perturbed_demonstrations(session: Session) -> Rollouts:
    """Expert episodes led astray on purpose, chunk by chunk, so that the model sees failures near success."""
    config, path = session.config, session.world_model / "perturbed.safetensors"
    if not path.exists():
        name, seed = "perturbed demonstrations", derive_seed(config.seed, "perturbed") % 2**32
        starts = session.starts(name, config.world_model.perturbed)
        with session.ledger.phase(name), Progress(name, len(starts), unit="episode") as progress:
            raw = perturbed_rollouts(session.environment, starts, seed=seed, on_done=progress.advance)
        rollouts = encode_rollouts(raw, session.base_policy(), config.recorded)
        save_rollouts(path, replace(rollouts, extra={"planning_seconds": raw.extra["planning_seconds"]}))
    rollouts = load_rollouts(path)
    book_perturbed(session, rollouts)
    note(f"perturbed demonstrations: {rollouts.returns().mean():.2f} success on {len(rollouts)} rollouts")
    no_policy = torch.full_like(rollouts.member, -1)  # no state that the policy itself has reached
    return replace(rollouts, member=no_policy, extra={})


def book_perturbed(session: Session, rollouts: Rollouts) -> None:
    """Book the episodes and, apart, that the expert looked one chunk ahead in the simulator and took it back: executed, so
    counted."""
    session.book_once("perturbed demonstrations", rollouts)
    if not session.ledger.has(PLANNING):
        seconds = rollouts.extra["planning_seconds"]
        session.ledger.record_counts(PLANNING, decisions=rollouts.num_decisions(), episodes=0, seconds=float(seconds.sum()))
        session.save_ledger()


def base_seed(config: RunConfig) -> int:
    """Noise seed of the base rollouts, shared with their imagined twins."""
    return derive_seed(config.seed, "base rollouts")


def session_beginnings(session: Session, policy: ChunkPolicy, buffer: Buffer | None = None) -> Beginnings:
    """Where this run's world model may be entered, in the entries that it reads."""
    names = (*ENCODED, *session.config.world_model.latent.privileged)
    return Beginnings(session.encoded(policy), names=names, buffer=buffer)


def build_model(config: RunConfig, policy: ChunkPolicy, beginnings: Beginnings) -> LatentWorldModel:
    """A world model in the shapes of the policy, on its device."""
    encoder = policy.config.encoder
    space = observation_space(get_task(config.task), encoder.image_size)
    privileged = {name: math.prod(space[name].shape or ()) for name in config.world_model.latent.privileged}
    return LatentWorldModel(
        config.world_model.latent,
        sizes={"features": encoder.feature_size, "proprio": encoder.proprio_size, **privileged},
        chunk=(policy.config.chunk, policy.config.action_size),
        horizon=beginnings.environment.max_decisions,
        beginnings=beginnings,
        width=config.world_model.width,
        device=policy.device,
        precision=config.autocast,
    )


def examine_cross_fitted(session: Session, policy: ChunkPolicy, base: Rollouts, perturbed: Rollouts) -> tuple[Exam, Fold]:
    """The exam on the base rollouts, each judged by a model that never saw its start: also first evidence for the trust
    state."""
    config = session.config.world_model.exam
    with Progress("exam", config.folds, unit="fold") as progress:

        def examine_next(training: Rollouts, held_out: Rollouts) -> Fold:
            fold = examine_fold(session, policy, training, held_out)
            progress.advance()
            return fold

        return merge(cross_fit(base, perturbed, config.folds, examine_next), config)


def examine_fold(session: Session, policy: ChunkPolicy, training: Rollouts, held_out: Rollouts) -> Fold:
    """What a model fitted on the other folds says of this one."""
    config, buffer = session.config, Buffer()
    buffer.add(training)
    model = build_model(config, policy, session_beginnings(session, policy, buffer))
    model.fit(training, seed=derive_seed(config.seed, "exam", held_out.starts[0].group_key))
    twin = collect(model.environment(), policy, held_out.starts, held_out.member.tolist(), seed=base_seed(config))
    session.ledger.record("exam, imagined", twin)
    change = None
    if config.train.imagine_from == "keyframes":
        change = proposed_change(session, policy, model, buffer, held_out)
    return Fold(held_out, model.member_hazards(held_out), twin, one_chunk_error(model, held_out), change)


def proposed_change(
    session: Session, policy: ChunkPolicy, model: LatentWorldModel, buffer: Buffer, held_out: Rollouts
) -> Tensor:
    """(B, T) what updates of the policy, imagined from keyframes, change of the probability of held-out real decisions."""
    config, seed = session.config, derive_seed(session.config.seed, "exam updates", held_out.starts[0].group_key)
    correction = Correction(config.train.correction, judged_by_updates=True)
    updated = copy.deepcopy(policy)
    objective = Objective(config.train.objective, updated, policy)
    keyframes = Keyframes(buffer, seed)
    for block in range(config.world_model.exam.updates):
        chosen = keyframes(0, block, config.train.correction.imagined_groups)
        rows, members = expand(chosen, config.train.correction.group_size)
        imagined = collect(model.environment(), updated, rows, members, seed=derive_seed(seed, block))
        session.ledger.record("exam, imagined", imagined)
        objective.update(
            correction.imagined_batch(branches(imagined)).sources, seed=derive_seed(seed, "minibatches", block), extra=True
        )
    with torch.no_grad():
        return relative_change(updated.log_prob(held_out.inputs, held_out.actions), held_out)


def one_chunk_error(model: LatentWorldModel, rollouts: Rollouts) -> float:
    """Squared error of the predicted change of state over one chunk, relative to always predicting no change (0 perfect, 1
    useless)."""
    data = Transitions.of(rollouts, model.sizes)
    following, _ = model.network.imagine(data.state, data.chunk)
    scale, known = model.network.change_scale.cpu(), data.continues > 0
    error = (((following - data.following) / scale)[known]).square().mean()
    return (error / (((data.following - data.state) / scale)[known]).square().mean()).item()


def encode_rollouts(raw: Rollouts, policy: ChunkPolicy, recorded: Sequence[str] = ()) -> Rollouts:
    """Camera rollouts as the policy's features, and the entries `recorded` as they are; log-probabilities are those of the
    policy (the expert has none)."""
    instructions = [start.instruction for start in raw.starts]
    steps = [
        policy.encode({**{k: v[:, t] for k, v in raw.inputs.items()}, "instruction": instructions})
        for t in range(raw.rewards.shape[1])
    ]
    inputs = {name: torch.stack([step[name] for step in steps], dim=1) for name in steps[0]}
    final = policy.encode({**raw.final, "instruction": instructions})
    with torch.no_grad():
        log_probs = policy.log_prob(inputs, raw.actions)
    token_mask = torch.ones_like(log_probs, dtype=torch.bool)
    inputs |= {name: raw.inputs[name] for name in recorded}
    final |= {name: raw.final[name] for name in recorded}
    return replace(raw, inputs=inputs, final=final, log_probs=log_probs, token_mask=token_mask, extra={})


def read_exam(session: Session) -> Exam:
    """The exam in the folder; numbers that could not be formed (null in JSON) are NaN again."""
    values: dict[str, Any] = read_json(session.world_model / "exam.json")
    return Exam(**{name: _restored(value) for name, value in values.items()})


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(item) for item in value)
    return float("nan") if value is None else value


def load_model(session: Session, policy: ChunkPolicy, buffer: Buffer | None = None) -> LatentWorldModel:
    """The first world model, ready for training; `buffer` holds the keyframes that it may be entered at."""
    path = session.world_model / "model.safetensors"
    if not path.exists():
        raise ValueError(f"expected a fitted world model at {path}, found none; run `wmrl-world-model` first")
    model = build_model(session.config, policy, session_beginnings(session, policy, buffer))
    model.load_state_dict(load_state(path))
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Console command."""
    return run_in_session(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
