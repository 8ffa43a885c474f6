"""Folders of studies for tests, made up run by run."""

import json
from dataclasses import replace

from run_folders import evaluation_line, made_up, step_line

import megabatch as mb
from megabatch.study.trials import Trial, at_rate, write_label


def made_up_run(
    study,
    batch,
    seed,
    top1,
    arm="recipe",
    kind="run",
    factor=1.0,
    epochs=4,
    noise=50.0,
    config=None,
    **summarised,
):
    """A finished run whose curve rises evenly to its top-1."""
    config = config or mb.recipes.named("digits", epochs=epochs, batch=batch)
    trial = Trial(kind, arm, batch, at_rate(replace(config, seed=seed), factor), factor)
    lines = [step_line(n, batch=batch, noise_scale=noise) for n in range(4)]
    lines += [evaluation_line(e, top1=top1 * e / epochs) for e in range(1, epochs + 1)]
    summary = {
        "ended": "finished", "top1": top1, "steps": 4000 // batch, "seconds": 10.0,
        "images_per_second": 400.0, "epochs": epochs, "seen": 4000,
        **summarised,
    }  # fmt: skip
    folder = made_up(study / trial.name, lines, json.loads(trial.config.to_json()), summary=summary)
    write_label(folder, trial)
    return folder


def changed(path, **settings):
    """An object in a file, by hand."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
