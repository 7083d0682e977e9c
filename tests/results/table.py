"""Our scores beside the paper's: the README's table, and a picture of the learning curves, from the finished runs here.

    python tests/results/table.py                     # print the table, draw .github/learning_curves.png
    python tests/results/table.py --add runs/NAME     # first add a finished run: its results.json, commit and machine
"""

import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FOLDER = ROOT / "tests/results/100k"
METHODS = {"spirl": "SPIRL", "de-rainbow": "DE-Rainbow", "de-rainbow-p": "DE-Rainbow-P", "mae-all": "MAE-All"}
PAPER = {  # Tables 1 and 2: mean, standard deviation
    "Frostbite": {"spirl": (669.5, 731.7), "de-rainbow": (341.4, 277.8), "de-rainbow-p": (483.7, 710.7),
                  "mae-all": (405.7, 382.3)},
    "MsPacman": {"spirl": (904.1, 286.4), "de-rainbow": (1015.2, 124.3), "de-rainbow-p": (985.4, 129.6),
                 "mae-all": (760.3, 210.0)},
    "Seaquest": {"spirl": (557.9, 148.1), "de-rainbow": (395.6, 124.4), "de-rainbow-p": (462.5, 187.8),
                 "mae-all": (538.4, 79.8)},
    "BattleZone": {"spirl": (11980.0, 3826.7), "de-rainbow": (10602.2, 2299.6), "de-rainbow-p": (13992.0, 4713.5),
                   "mae-all": (10628.0, 3176.9)},
}


@dataclass
class Args:
    """The command line: each field is a flag, and the comment beside it the flag's help."""

    add: Path | None = None  # the folder of a finished run, in a checkout of the commit that made it


def add(run_dir):
    """Write the run's results.json to FOLDER, with its commit, its command, its machine and its MAE's arguments."""
    results = json.loads((run_dir / "results.json").read_text())
    game, method = results["env_id"][4:].split("-")[0], results["method"]
    script = "spirl_rainbow" if method == "spirl" else "spirl_baselines"
    defaults = dataclasses.asdict(importlib.import_module(script).Args())
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in results["args"].items()
             if value != defaults[name] and name != "resume"]
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    del results["evaluations"]  # `scores` is the only one's
    results |= {
        "commit": subprocess.check_output(["git", "-C", run_dir, "rev-parse", "HEAD"], text=True).strip(),
        "command": " ".join(["python", f"{script}.py", *flags]),
        "machine": f"{cpu.split(': ')[1]}, {os.cpu_count()} cores, {platform.system()}"}
    if (run_dir / "mae.pt").exists():
        results["mae_args"] = torch.load(run_dir / "mae.pt", weights_only=True)["args"]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{game}__{method}__{results['seed']}.json").write_text(json.dumps(results))


def read():
    """{(game, method): [results of a seed, ...]} in the order of the paper's games."""
    runs = {(game, method): [json.loads(path.read_text()) for path in sorted(FOLDER.glob(f"{game}__{method}__*.json"))]
            for game in PAPER for method in METHODS}
    return {key: seeds for key, seeds in runs.items() if seeds}


def table(runs):
    """The README's table, in Markdown: a deviation is the one of the seeds' means."""
    rows = ["| game | method | seeds | ours | the paper's |", "|---|---|---|---|---|"]
    for (game, method), seeds in runs.items():
        means = [results["mean"] for results in seeds]
        deviation = f" ({np.std(means, ddof=1):.1f})" if len(seeds) > 1 else ""
        mean, std = PAPER[game][method]
        rows.append(f"| {game} | {METHODS[method]} | {len(seeds)} | {np.mean(means):.1f}{deviation} | {mean} ({std}) |")
    return "\n".join(rows)


def draw(runs, path, window=5000):
    """One panel a game: the mean training score of the games that ended in the last `window` steps, mean over the
    seeds and their range; crosses are our final scores, dashed lines the paper's."""
    games = list(dict.fromkeys(game for game, _ in runs))
    figure = Figure(figsize=(max(7, 3.5 * len(games)), 4), layout="constrained")
    axes = figure.subplots(1, len(games), squeeze=False)[0]
    colors = dict(zip(METHODS, ("#D55E00", "#0072B2", "#009E73", "#CC79A7")))
    for (game, method), seeds in runs.items():
        axis, color = axes[games.index(game)], colors[method]
        steps, curves = np.arange(window, seeds[0]["steps"] + 1, 1000), []
        for results in seeds:
            ends, scores = np.array(results["training_scores"]).T
            curves.append([scores[(ends > step - window) & (ends <= step)].mean() for step in steps])
        axis.plot(steps, np.mean(curves, 0), color=color, label=METHODS[method])
        axis.fill_between(steps, np.min(curves, 0), np.max(curves, 0), color=color, alpha=0.15)
        axis.plot(seeds[0]["steps"], np.mean([results["mean"] for results in seeds]), "x", color=color)
        axis.axhline(PAPER[game][method][0], color=color, linestyle="--", linewidth=1)
        axis.set(title=game, xlabel="steps")
    axes[0].set_ylabel("score of a training game")
    axes[0].plot([], [], "kx", label="final weights, 50 games")
    axes[0].plot([], [], "k--", linewidth=1, label="the paper's final score")
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__.split("\n\n")[0])
    if args.add:
        add(args.add)
    runs = read()
    print(table(runs))
    draw(runs, ROOT / ".github/learning_curves.png")
