"""Our scores beside the paper's, from the finished runs in tests/results/100k: the README's table and a picture.

    python tests/results/table.py                     # print the table, draw .github/learning_curves.png
    python tests/results/table.py --add runs/NAME     # first add a finished run, on the machine that made it
"""

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
import spirl_baselines  # noqa: E402
import spirl_rainbow  # noqa: E402

FOLDER = ROOT / "tests/results/100k"
SCRIPTS = {"spirl": spirl_rainbow, "de-rainbow": spirl_baselines, "mae-all": spirl_baselines}
METHODS = {"spirl": "SPIRL", "de-rainbow": "DE-Rainbow", "mae-all": "MAE-All"}
PAPER = {  # Tables 1 and 2: mean, standard deviation
    "Frostbite": {"spirl": (669.5, 731.7), "de-rainbow": (341.4, 277.8), "mae-all": (405.7, 382.3)},
    "MsPacman": {"spirl": (904.1, 286.4), "de-rainbow": (1015.2, 124.3), "mae-all": (760.3, 210.0)},
    "Seaquest": {"spirl": (557.9, 148.1), "de-rainbow": (395.6, 124.4), "mae-all": (538.4, 79.8)},
    "BattleZone": {"spirl": (11980.0, 3826.7), "de-rainbow": (10602.2, 2299.6), "mae-all": (10628.0, 3176.9)},
}


@dataclass
class Args:
    """The command line: each field is a flag, and the comment beside it the flag's help."""

    add: Path | None = None  # the folder of a finished run, in a checkout of the commit that made it


def add(run_dir):
    """Write the run's results.json to FOLDER, with its commit, its command, its machine and its MAE's arguments."""
    results = json.loads((run_dir / "results.json").read_text())
    game, method = results["env_id"][4:].split("-")[0], results["method"]
    defaults = vars(SCRIPTS[method].Args())
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in results["args"].items()
             if value != defaults[name] and name != "resume"]
    capability = torch.backends.cpu.get_cpu_capability()
    machine = f"{platform.system()} {platform.machine()}, {capability}, {os.cpu_count()} cores"
    if results["device"] != "cpu":
        machine += f", {torch.cuda.get_device_name(results['device'])}"
    del results["evaluations"]  # a 100K run has one, and `scores` are its
    results |= {  # a commit with "-dirty" is not the one that made the run
        "commit": subprocess.check_output("git describe --always --dirty --abbrev=40 --exclude *".split(),
                                          cwd=run_dir, text=True).strip(),
        "command": " ".join(["python", f"{SCRIPTS[method].__name__}.py", *flags]),
        "machine": machine}
    if method != "de-rainbow":
        results["mae_args"] = torch.load(run_dir / "mae.pt", weights_only=True)["args"]
    (FOLDER / f"{game}__{method}__{results['seed']}.json").write_text(json.dumps(results))


def read():
    """{(game, method): [results of a seed, ...]} in the order of the paper's games."""
    runs = {(game, method): [json.loads(path.read_text()) for path in sorted(FOLDER.glob(f"{game}__{method}__*.json"))]
            for game in PAPER for method in METHODS}
    return {key: seeds for key, seeds in runs.items() if seeds}


def markdown(runs):
    """The README's table: a row a game and method, our mean and standard deviation over the seeds' means."""
    rows = ["| game | method | seeds | ours | the paper's (5 seeds, DE-Rainbow 10) |", "|---|---|---|---|---|"]
    for (game, method), seeds in runs.items():
        means = [results["mean"] for results in seeds]
        deviation = f" ({np.std(means, ddof=1):.1f})" if len(seeds) > 1 else ""
        mean, std = PAPER[game][method]
        rows.append(f"| {game} | {METHODS[method]} | {len(seeds)} | {np.mean(means):.1f}{deviation} | {mean} ({std}) |")
    return "\n".join(rows)


def draw(runs, path):
    """One panel a game: the mean score of the last ten training games, its mean and range over the seeds; at the end
    crosses for our final scores and diamonds for the paper's."""
    games = list(dict.fromkeys(game for game, _ in runs))
    figure = Figure(figsize=(max(7, 3.5 * len(games)), 4), layout="constrained")
    axes = figure.subplots(1, len(games), squeeze=False)[0]
    colors = dict(zip(METHODS, ("#D55E00", "#0072B2", "#009E73")))
    steps = np.arange(5_000, 100_001, 1000)
    for (game, method), seeds in runs.items():
        axis, color, curves = axes[games.index(game)], colors[method], []
        for results in seeds:
            ends, scores = np.array(results["training_scores"]).T
            finished = np.searchsorted(ends, steps, side="right")  # games that had ended at each step
            curves.append([scores[max(0, n - 10) : n].mean() for n in finished])
        axis.plot(steps, np.mean(curves, 0), color=color, label=METHODS[method])
        axis.fill_between(steps, np.min(curves, 0), np.max(curves, 0), color=color, alpha=0.15)
        axis.plot(steps[-1], np.mean([results["mean"] for results in seeds]), "x", color=color)
        axis.plot(steps[-1], PAPER[game][method][0], "D", color=color, fillstyle="none")
        axis.set(title=game, xlabel="steps", xlim=(0, 104_000), xticks=(0, 50_000, 100_000))
    axes[0].set_ylabel("mean score of the last ten training games")
    axes[-1].plot([], [], "kx", label="ours: final weights, 50 games")
    axes[-1].plot([], [], "kD", fillstyle="none", label="the paper's")
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__.split("\n\n")[0])
    if args.add:
        add(args.add)
    runs = read()
    print(markdown(runs))
    draw(runs, ROOT / ".github/learning_curves.png")
