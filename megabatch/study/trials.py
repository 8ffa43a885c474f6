"""The runs of a study: which there are, what each is called, and what their folders tell.

Every run has a folder of its own inside the study's, so that a study grows by being run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.host.durable import is_plain, read_plain, write_whole
from megabatch.recipes.by_batch import fitted
from megabatch.runs.record import number

RECIPE = "recipe"
"""the arm that changes nothing"""
TUNING_SHARE = 0.1
"""of the training images, that rates are chosen by"""
_PROBE_SHARE, _PROBE_EPOCHS = 0.1, 2.0
"""a probe is so much of a run, and at least so many epochs"""
_PROBE_MICROS = 16
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Trial:
    """One run: the recipe at a batch, with one thing changed or nothing, from one seed."""

    kind: str
    """run, rate (one of a search, judged by held-out training images) or probe"""
    arm: str
    batch: int
    config: Config
    factor: float = 1.0
    """of the recipe's rate"""
    flags: str = ""
    """what an arm of the caller's own changes"""

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def name(self) -> str:
        arm = "" if self.arm == RECIPE else f"{self.arm}-"
        if self.kind == "rate":
            return f"rate-{self.batch}-{arm}x{self.factor:.15g}-s{self.seed}"
        return f"{'probe-' * (self.kind == 'probe')}{self.batch}-{arm}s{self.seed}"

    def label(self) -> dict[str, Any]:
        """What its folder says of it beside the config."""
        return {
            "kind": self.kind,
            "arm": self.arm,
            "batch": self.batch,
            "seed": self.seed,
            "factor": self.factor,
            **({"flags": self.flags} if self.flags else {}),
        }


@dataclass(frozen=True)
class StudyPlan:
    """What a study is to run."""

    configs: dict[tuple[str, int], Config]
    """by arm and batch, in the order of the runs"""
    seeds: range
    rates: tuple[float, ...] = ()
    """multiples of a rate to choose among: of the recipe's, and of those that arms bring"""
    own_rates: frozenset[str] = frozenset()
    """arms that bring a rate of their own; the others have the recipe's"""
    given_rates: frozenset[str] = frozenset()
    """arms whose rate was given by hand, and stays as it is"""
    flags: Mapping[str, str] = field(default_factory=dict)
    """of arms of the caller's own, by name"""
    probe: bool = False

    def runs(self, factors: Mapping[tuple[str, int], float]) -> list[Trial]:
        """A run for each arm and batch from each seed, at its rate times what was chosen; all
        batches from one seed before the next, so that a study that is stopped has some of
        everything."""
        found = []
        for seed in self.seeds:
            for (arm, batch), config in self.configs.items():
                whose = arm if arm in self.own_rates | self.given_rates else RECIPE
                factor = factors.get((whose, batch), 1.0)
                seeded = replace(at_rate(config, factor), seed=seed)
                found.append(Trial("run", arm, batch, seeded, factor, self.flags.get(arm, "")))
        return found

    def search(self) -> list[Trial]:
        """The runs that rates are chosen by: they see a part of the training images, are judged by
        the rest, and never see the validation images."""
        return [
            Trial("rate", arm, batch, _for_tuning(at_rate(config, rate), self.seeds[0]), rate)
            for (arm, batch), config in self.configs.items()
            if arm == RECIPE or arm in self.own_rates
            for rate in self.rates
        ]

    def probes(self) -> list[Trial]:
        """A short run at the largest batch, for the noise scale."""
        largest = max((batch for arm, batch in self.configs if arm == RECIPE), default=0)
        if not self.probe or not largest:
            return []
        config = replace(self.configs[RECIPE, largest], seed=self.seeds[0])
        epochs = min(config.epochs, max(_PROBE_EPOCHS, _PROBE_SHARE * config.epochs))
        # The more passes a step is made of, the surer the estimate.
        micro = max(config.span, min(config.micro, largest // _PROBE_MICROS))
        short = replace(config.resized(epochs=epochs), micro=micro, eval_every=0.0)
        return [Trial("probe", RECIPE, largest, fitted(short))]


def at_rate(config: Config, factor: float) -> Config:
    return replace(config, lr=replace(config.lr, reference=config.lr.reference * factor))


def _for_tuning(config: Config, seed: int) -> Config:
    return replace(config, seed=seed, data=replace(config.data, tuning_share=TUNING_SHARE))


# --- what folders tell -------------------------------------------------------------------------


def write_label(folder: Path, trial: Trial, failure: str | None = None) -> None:
    record = trial.label() | ({"failure": failure} if failure is not None else {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "trial.json", (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror or error}): make room there, then give "
            f"the same command again"
        ) from None


def mend_label(folder: Path, trial: Trial) -> None:
    """Of a finished run: a study counts its runs by what their labels say, and what failed beside
    it in its last moment did not fail it."""
    if read_object(folder / "trial.json") != trial.label():
        write_label(folder, trial)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is none."""
    if not is_plain(path):
        return {}
    try:
        found = json.loads(read_plain(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def state(folder: Path, trial: Trial) -> str:
    """new, begun, finished or failed; an error where the folder holds another run."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is no folder: remove it, or name another --out")
    label = read_object(folder / "trial.json")
    written = folder / "config.json"
    if is_plain(written):
        try:
            difference = Config.read(written).resume_difference(trial.config)
        except UserError as error:
            raise UserError(f"{error}; remove {folder} to run it anew") from None
        if difference is not None:
            if difference.startswith("lr.reference") and label.get("factor") != trial.factor:
                raise UserError(
                    f"{folder} was run at {label.get('factor')} times its rate, and the search now "
                    f"chooses {trial.factor:g} times: remove the runs at {trial.batch:,} to make "
                    f"them anew, or name another --out"
                )
            raise UserError(
                f"{folder} was begun with {difference}: give the same settings, or name another "
                f"--out"
            )
        if is_finished(read_object(folder / "summary.json")):
            return "finished"
    return "failed" if "failure" in label else "begun" if is_plain(written) else "new"


def check_beside(study: Path, trials: Sequence[Trial]) -> None:
    """Refuse runs whose results would be taken together with those of other settings: of one arm
    and batch all are alike but for their seeds, and an arm's flags are the same at all batches."""
    names = {trial.name for trial in trials}
    wanted = {(trial.arm, trial.batch): trial for trial in trials}
    flags = {trial.arm: trial.flags for trial in trials}
    for folder in folders(study):
        label = {} if folder.name in names else read_object(folder / "trial.json")
        arm, batch, seed = (label.get(name) for name in ("arm", "batch", "seed"))
        if label.get("kind") != "run" or not isinstance(arm, str) or type(seed) is not int:
            continue
        if arm in flags and label.get("flags", flags[arm]) != flags[arm]:
            raise UserError(
                f"{folder} is of the arm {arm}={label['flags']!r}, which is {flags[arm]!r} now: "
                f"give an arm of other flags another name"
            )
        if isinstance(batch, int) and (trial := wanted.get((arm, batch))) is not None:
            state(folder, replace(trial, config=replace(trial.config, seed=seed)))


def has_ended(folder: Path) -> bool:
    """Whether a study that goes on has nothing to run there, whatever run it is."""
    ended = is_finished(read_object(folder / "summary.json"))
    return ended or "failure" in read_object(folder / "trial.json")


def is_finished(summary: Mapping[str, Any]) -> bool:
    """Whether it is that of a run which ended by itself, with an accuracy."""
    return summary.get("ended") in ("finished", "target") and 0 <= number(summary.get("top1")) <= 1


def folders(study: Path) -> Iterator[Path]:
    """The folders of a study's runs."""
    for path in sorted(study.iterdir()) if study.is_dir() else ():
        if is_plain(path / "trial.json"):
            yield path


def is_study(path: Path) -> bool:
    return next(folders(path), None) is not None
