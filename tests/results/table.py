"""Our scores beside the paper's, from the finished runs in tests/results/100k: the tables of the READMEs and a picture.

    python tests/results/table.py                     # print the tables, draw .github/learning_curves.png
    python tests/results/table.py --add runs/NAME     # only add a finished run, on the machine that made it
    python tests/results/table.py --add runs/NAME --into tests/results/fixed     # one with another flag or MAE
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
EARLIER = ROOT / "tests/results/xavier_start"  # runs whose agent began with Xavier weights and zero biases
ABLATIONS = {  # SPIRL's runs on Seaquest with one change: the folder, the change, the paper's score (Tables 3 and 14)
    ROOT / "tests/results/fixed": ("`--selection fixed`", "496.3 (90.1)"),
    ROOT / "tests/results/mask": ("`--padding mask`", "494.4 (154.8)"),
    ROOT / "tests/results/decoder_refresh": ("the MAE's decoder learns on at step 20,000", "not in it"),
}
MAES = {  # what Ms. Pac-Man's MAE has seen, the agent's initial weights: the folder of SPIRL's runs with both
    ("first lives, 50,000 frames, 8 epochs: `tests/weights/`", "PyTorch's"): FOLDER,
    ("the same", "Xavier's"): EARLIER,
    ("whole games, bfloat16, else the same: that of commit 2bb6831", "PyTorch's"): ROOT / "tests/results/whole_games",
    ("whole games, as above", "Xavier's"): ROOT / "tests/results/whole_games_xavier",
    ("whole games, 100,000 frames, 16 epochs", "PyTorch's"): ROOT / "tests/results/twice_the_frames",
}
SCRIPTS = {"spirl": spirl_rainbow, "de-rainbow": spirl_baselines, "de-rainbow-p": spirl_baselines,
           "mae-all": spirl_baselines}
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
# Scores of random play and of a human, as in Wang et al. 2016 (dueling networks) and dqn_zoo's atari_data.py.
RANDOM_AND_HUMAN = {"Frostbite": (65.2, 4334.7), "MsPacman": (307.3, 6951.6), "Seaquest": (68.4, 42054.7),
                    "BattleZone": (2360.0, 37187.5)}
EARLY_AND_LATE = (10_000, 25_000, 50_000, 100_000)  # the steps at which data efficiency is tabulated


@dataclass
class Args:
    """The command line: each field is a flag, and the comment beside it the flag's help."""

    add: Path | None = None  # the folder of a finished run, in a checkout of the commit that made it
    into: Path = FOLDER  # where it is stored; a file that is there is not replaced


def add(run_dir, folder):
    """Write the run's results.json to `folder`, with its commit, its command, its machine and its MAE's arguments."""
    results = json.loads((run_dir / "results.json").read_text())
    game, method = results["env_id"][4:].split("-")[0], results["method"]
    defaults = vars(SCRIPTS[method].Args())
    not_given = {"resume"}
    if method == "de-rainbow-p":  # it lengthens its run by itself
        not_given |= {"total_timesteps", "learning_starts"}
    flags = []
    for name, value in results["args"].items():
        if value != defaults[name] and name not in not_given:
            flag = f"--{name.replace('_', '-')}"
            flags.append(flag if value is True else f"{flag} {value}")  # every bool is off by default
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
    if method in ("spirl", "mae-all"):
        results["mae_args"] = torch.load(run_dir / "mae.pt", weights_only=True)["args"]
    with open(folder / f"{game}__{method}__{results['seed']}.json", "x") as file:
        file.write(json.dumps(results))


def read(folder=FOLDER):
    """{(game, method): [results of a seed, ...]} in the order of the paper's games."""
    runs = {(game, method): [json.loads(path.read_text()) for path in sorted(folder.glob(f"{game}__{method}__*.json"))]
            for game in PAPER for method in METHODS}
    return {key: seeds for key, seeds in runs.items() if seeds}


def human_normalised(game, score):
    """A score in %: 0 is random play, 100 a human."""
    random, human = RANDOM_AND_HUMAN[game]
    return 100 * (score - random) / (human - random)


def last_ten_games(results, steps):
    """A run's learning curve: for each of `steps` the mean score of the last ten training games that had ended by then,
    or of all of them where fewer had."""
    ends, scores = np.array(results["training_scores"]).T
    ends -= results["steps"] - 100_000  # DE-Rainbow-P: without the random steps that it has besides
    ended = np.searchsorted(ends, steps, side="right")  # how many games had ended at each step
    return [scores[max(0, n - 10) : n].mean() for n in ended]


def headline(runs):
    """The README's first table: a row a game, and for each method our mean, the number of seeds, and the paper's."""
    columns = [f"{name}, ours | paper" for name in METHODS.values()]
    rows = [f"| game | {' | '.join(columns)} |", "|---" * (1 + 2 * len(METHODS)) + "|"]
    for game in PAPER:
        cells = []
        for method in METHODS:
            means = [results["mean"] for results in runs.get((game, method), [])]
            ours = f"{np.mean(means):.0f} ({len(means)})" if means else ""
            cells.append(f"{ours} | {PAPER[game][method][0]:.0f}")
        rows.append(f"| {game} | {' | '.join(cells)} |")
    return "\n".join(rows)


def efficiency(runs):
    """The table of data efficiency: for each game and method the learning curve, its mean over the seeds, at four
    numbers of steps."""
    rows = [f"| game | method | number of seeds | {' | '.join(f'{steps:,} steps' for steps in EARLY_AND_LATE)} |",
            "|---" * (3 + len(EARLY_AND_LATE)) + "|"]
    for (game, method), seeds in runs.items():
        curve = np.mean([last_ten_games(results, EARLY_AND_LATE) for results in seeds], 0)
        cells = " | ".join(f"{score:.0f}" for score in curve)
        rows.append(f"| {game} | {METHODS[method]} | {len(seeds)} | {cells} |")
    return "\n".join(rows)


def markdown(runs):
    """The table of all scores: a row a game and method, our mean and standard deviation over the seeds' means, the
    paper's, how many of the paper's deviations ours is above or below, and both human-normalised; then for each method
    that was run on all games the median of that over the games."""
    rows = ["| game | method | number of seeds | ours | the paper's (5 seeds, DE-Rainbow 10) | ours minus the paper's, "
            "in its deviations | ours, % of human | the paper's, % of human |", "|---|---|---|---|---|---|---|---|"]
    normalised = {method: [] for method in METHODS}
    for (game, method), seeds in runs.items():
        means = [results["mean"] for results in seeds]
        deviation = f" ({np.std(means, ddof=1):.1f})" if len(seeds) > 1 else ""
        mean, std = PAPER[game][method]
        percent = [human_normalised(game, score) for score in (np.mean(means), mean)]
        normalised[method].append(percent)
        rows.append(f"| {game} | {METHODS[method]} | {len(seeds)} | {np.mean(means):.1f}{deviation} | {mean} ({std}) | "
                    f"{(np.mean(means) - mean) / std:+.1f} | {percent[0]:.1f} | {percent[1]:.1f} |")
    for method, percents in normalised.items():
        if len(percents) == len(PAPER):
            ours, theirs = np.median(percents, 0)
            rows.append(f"| median of the games | {METHODS[method]} | | | | | {ours:.1f} | {theirs:.1f} |")
    return "\n".join(rows)


def starts(runs):
    """SPIRL and MAE-All with the agent's initial weights as they are now, and as they were: each seed, and the mean
    minus the paper's, in its deviations."""
    rows = ["| game | method | PyTorch's initial weights: each seed; their mean minus the paper's, in its deviations | "
            "Xavier's, as before |", "|---|---|---|---|"]
    for (game, method), earlier in read(EARLIER).items():
        cells = []
        for seeds in (runs[game, method], earlier):
            means = [results["mean"] for results in seeds]
            distance = (np.mean(means) - PAPER[game][method][0]) / PAPER[game][method][1]
            cells.append(f"{', '.join(f'{mean:.1f}' for mean in means)}; {distance:+.1f}")
        rows.append(f"| {game} | {METHODS[method]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def ablations(runs):
    """SPIRL on Seaquest as it is and with one change: each seed's score, beside the paper's."""
    mean, std = PAPER["Seaquest"]["spirl"]
    table = [("none", runs["Seaquest", "spirl"], f"{mean} ({std})")]
    table += [(change, read(folder)["Seaquest", "spirl"], paper) for folder, (change, paper) in ABLATIONS.items()]
    rows = ["| SPIRL on Seaquest, changed | ours, seed by seed | the paper's (5 seeds) |", "|---|---|---|"]
    for change, seeds, paper in table:
        rows.append(f"| {change} | {', '.join(str(results['mean']) for results in seeds)} | {paper} |")
    return "\n".join(rows)


def maes(runs):
    """SPIRL on Ms. Pac-Man with the MAE of tests/weights/ and with others: each seed's score, and their means."""
    rows = ["| what the MAE has seen | initial weights | SPIRL on Ms. Pac-Man: each seed | mean | "
            "the last ten training games, mean |", "|---|---|---|---|---|"]
    for (mae, start), folder in MAES.items():
        seeds = read(folder)["MsPacman", "spirl"]
        means = [results["mean"] for results in seeds]
        training = np.mean([last_ten_games(results, [100_000]) for results in seeds])
        rows.append(f"| {mae} | {start} | {', '.join(map(str, means))} | {np.mean(means):.1f} | {training:.0f} |")
    return "\n".join(rows)


# What is printed, and which file has it (tests/product/test_results.py).
TABLES = {headline: "README.md"}
TABLES |= dict.fromkeys((efficiency, markdown, starts, ablations, maes), "tests/results/README.md")


def draw(runs, path):
    """One panel a game: the mean score of the last ten training games, each seed thin and their mean bold; at the end
    crosses for our final scores and diamonds for the paper's."""
    games = list(dict.fromkeys(game for game, _ in runs))
    figure = Figure(figsize=(max(7, 3.5 * len(games)), 4), layout="constrained")
    axes = figure.subplots(1, len(games), squeeze=False)[0]
    colors = dict(zip(METHODS, ("#D55E00", "#0072B2", "#CC79A7", "#009E73")))
    for (game, method), seeds in runs.items():
        axis, color, curves = axes[games.index(game)], colors[method], []
        steps = np.arange(5_000, 100_001, 1000)
        for results in seeds:
            curves.append(last_ten_games(results, steps))
            if len(seeds) > 1:
                axis.plot(steps, curves[-1], color=color, linewidth=0.8, alpha=0.6)
        axis.plot(steps, np.mean(curves, 0), color=color, linewidth=2, label=METHODS[method])
        axis.plot(steps[-1], np.mean([results["mean"] for results in seeds]), "x", color=color)
        axis.plot(steps[-1], PAPER[game][method][0], "D", color=color, fillstyle="none")
        axis.set(title=game, xlabel="steps", xticks=(0, 50_000, 100_000))
        axis.set_xlim(left=0)
    axes[0].set_ylabel("mean score of the last ten training games")
    axes[-1].plot([], [], "kx", label="ours: final weights, 50 games")
    axes[-1].plot([], [], "kD", fillstyle="none", label="the paper's")
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__.split("\n\n")[0])
    if args.add:
        add(args.add, args.into)  # and no picture: a changed one would make the next run's commit "-dirty"
    else:
        runs = read()
        print("\n\n".join(rows(runs) for rows in TABLES))
        draw(runs, ROOT / ".github/learning_curves.png")
