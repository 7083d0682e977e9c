"""What the share of hidden patches in pre-training does to K: a table on the terminal, and a picture.

    python tests/benchmarks/mask_spread.py                   # train one with 75 % hidden, and measure it
    python tests/benchmarks/mask_spread.py --spread 0.21     # another one with 54 to 96 % hidden
    python tests/benchmarks/mask_spread.py --report          # the table and the picture

A MAE stays in runs/mask_spread/, and training that was stopped goes on when the same command is given again. What was
measured of it, on 200 frames of random play with a seed of their own, 777, goes to tests/results/mask_spread/. What is
there is of whole games, as random play was collected then (before 5abe994); a new one is of first lives. Those with
"amp" in their name were trained under bfloat16 autocast, which the scripts could do then. Of some that are there only
the end of their training was kept, in three digits; Seaquest's of 50 epochs was trained by two processes, each with
half of every batch.
"""

import json
import math
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import spirl_mae  # noqa: E402

FOLDER = ROOT / "runs/mask_spread"
RESULTS = ROOT / "tests/results/mask_spread"
# The paper's mr*; its Table 3 prints the share that is left out, 60, 65, 80 and 70 %.
PAPER_IDEAL_RATIO = {"ALE/Frostbite-v5": 0.40, "ALE/MsPacman-v5": 0.35, "ALE/Seaquest-v5": 0.20,
                     "ALE/BattleZone-v5": 0.30}
MASK_RATIOS = (0.5, 0.75, 0.95, 0.98)
LENGTHS = ((50_000, "50,000 images", "--"), (400_000, "250,000 or 400,000", "-"), (math.inf, "more images", "-."))


@dataclass
class Args:
    """The command line: each field is a flag, and the comment beside it the flag's help."""

    env_id: Literal[tuple(PAPER_IDEAL_RATIO)] = "ALE/Frostbite-v5"  # the game
    seed: int = 1  # seed of the MAE and of its frames
    frames: int = 5000  # frames of random play to train on
    epochs: int = 10  # passes over them
    spread: float = 0.0  # --mae-mask-spread; 0 is the paper's one ratio
    device: str = "auto"  # as in the scripts
    report: bool = False  # print the table of what is there and draw the picture, train nothing


def train(args):
    """The folder of a trained MAE: `mae.pt`, and `epoch{n}.pt` of some epochs on the way."""
    kind = f"spread{args.spread:g}" if args.spread else "fixed"
    game = args.env_id[4:].split("-")[0]
    folder = FOLDER / f"{game}__{kind}__{args.frames}x{args.epochs}__{args.seed}"
    if (folder / "mae.pt").exists():
        return folder
    mae_args = spirl_mae.Args(env_id=args.env_id, seed=args.seed, mae_frames=args.frames, mae_epochs=args.epochs,
                          mae_mask_spread=args.spread, threads=1, device=args.device, resume=str(folder))
    spirl_mae.check_args(mae_args)
    device = spirl_mae.pick_device(args.device)
    frames = spirl_mae.collect_random_frames(mae_args, args.frames + spirl_mae.HELD_OUT_FRAMES)
    torch.manual_seed(args.seed)
    mae = spirl_mae.MaskedAutoencoder().to(device)
    atomic = spirl_mae.atomic

    @contextmanager
    def keep_some(path):  # pretrain_mae writes its checkpoint with it, after each epoch
        with atomic(path) as temporary:
            yield temporary
        epoch = len(torch.load(path, weights_only=True)["held_out_losses"])
        if epoch in (1, 2, 3, 5, 8, 10, 20, 30, 50, args.epochs):
            shutil.copyfile(path, folder / f"epoch{epoch:03d}.pt")

    spirl_mae.atomic = keep_some
    spirl_mae.pretrain_mae(mae_args, mae, frames[: args.frames], frames[args.frames :], folder)
    spirl_mae.atomic = atomic
    content = {"model": mae.state_dict(), "sizes": spirl_mae.mae_sizes(mae_args), "env_id": args.env_id,
               "args": vars(mae_args), "salient_counts": {}}
    spirl_mae.save(content, folder / "mae.pt")
    return folder


def measure(args, folder):
    """Write its file in RESULTS: of each epoch that was kept the loss by mask ratio, the error of surroundings, K."""
    device = spirl_mae.pick_device(args.device)
    frames = spirl_mae.collect_random_frames(spirl_mae.Args(env_id=args.env_id, seed=777), 3000)[::15]
    mae, measured = spirl_mae.MaskedAutoencoder().to(device), []
    flat = mae.patchify(frames).var(2).argsort(1)[:, : mae.num_patches // 4]  # the least contrast
    for path in sorted(folder.glob("epoch*.pt")):
        mae.load_state_dict(torch.load(path, weights_only=True, map_location=device)["model"])
        mae.requires_grad_(False)
        losses = [np.mean([mae(batch.to(device), ratio, torch.Generator(device).manual_seed(0))[0].item()
                           for batch in frames.split(100)]) for ratio in MASK_RATIOS]
        cache = spirl_mae.ErrorMapCache(mae)
        errors = torch.cat([cache(batch) for batch in frames.split(64)])
        _, counts = spirl_mae.select_salient_patches(errors, mae.num_patches)
        epoch = int(path.stem[5:])
        measured.append({
            "epoch": epoch, "images": epoch * (args.frames // 64) * 64, "losses": losses, "error": errors.mean().item(),
            "flat_error": errors.take_along_dim(flat, 1).mean().item(),
            "K": [100 * float(np.percentile(counts, q)) / mae.num_patches for q in (5, 50, 95)],
            "mr*": spirl_mae.ideal_max_ratio(counts, mae.num_patches)})
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{folder.name}.json").write_text(json.dumps(measured, indent=1))


def report():
    """The table of every MAE that was measured, and tests/benchmarks/mask_spread.png: K and loss, fixed and spread."""
    paths = sorted(RESULTS.glob("*.json"))
    print(f"| game | masks | frames x epochs, seed | loss at {', '.join(map(str, MASK_RATIOS))} | surroundings' error "
          "| of the flattest quarter | K, 5 % / median / 95 % of the frames, in % | smallest ratio for all 200 "
          "| paper's mr* |")
    print(9 * "|---" + "|")
    figure = Figure(figsize=(14, 8.5), layout="constrained")
    axes = figure.subplots(2, 4, sharex="row", sharey="row")
    games = list(PAPER_IDEAL_RATIO)
    for path in paths:
        game, masks, size, *seed = path.stem.split("__")  # seed: its number, and "amp"
        measured, paper = json.loads(path.read_text()), PAPER_IDEAL_RATIO[f"ALE/{game}-v5"]
        last, column = measured[-1], games.index(f"ALE/{game}-v5")
        print(f"| {game} | {masks} | {size}, {' '.join(seed)} | " + ", ".join(f"{loss:.3f}" for loss in last["losses"])
              + f" | {last['error']:.3f} | {last['flat_error']:.3f} | " + " / ".join(f"{k:.0f}" for k in last["K"])
              + f" | {last['mr*']:.0%} | {paper:.0%} |")
        if path.with_name(f"{path.stem}__amp.json").exists():
            continue  # the two would lie on top of each other
        images = np.array([row["images"] for row in measured])
        low, median, high = np.array([row["K"] for row in measured]).T
        length, line = next((text, line) for most, text, line in LENGTHS if images[-1] <= most)
        spread = float(masks.removeprefix("fixed").removeprefix("spread") or 0)
        hidden = f"{75 - 100 * spread:.0f} to {75 + 100 * spread:.0f}" if spread else "75"
        style = {"color": spirl_mae.BLUE if spread else spirl_mae.VERMILION, "linestyle": line, "marker": "o",
                 "markersize": 4, "label": f"{hidden} % hidden, {length}"}
        axes[0, column].plot(images, median, **style)
        if len(measured) > 1:
            axes[0, column].fill_between(images, low, high, color=style["color"], alpha=0.12)
        else:
            axes[0, column].vlines(images, low, high, color=style["color"])
        axes[0, column].plot(images[-1], 100 * last["mr*"], "x", color=style["color"], markersize=8)
        axes[1, column].plot(MASK_RATIOS, last["losses"], **style)
    for column, (game, ratio) in enumerate(PAPER_IDEAL_RATIO.items()):
        axes[0, column].axhline(100 * ratio, color="black", linestyle="--", label="the paper's mr*")
        axes[0, column].set(title=game[4:-3], xlabel="images trained on", xscale="log", ylim=(0, 100))
        axes[0, column].plot([], "kx", label="keeps all 200 frames whole")
        axes[1, column].axvline(136 / 144, color="black", linestyle=":", label="Eq. (3) hides 136 of 144")
        axes[1, column].set(xlabel="share of hidden patches", yscale="log")
    axes[0, 0].set_ylabel("K, % of the patches")
    axes[1, 0].set_ylabel("loss, Eq. (1), after training")
    lines = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}  # each once
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, handlelength=3.5)
    figure.savefig(ROOT / "tests/benchmarks/mask_spread.png", dpi=80)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__.split("\n\n")[0])
    torch.set_num_threads(1)
    if args.report:
        report()
    else:
        folder = train(args)
        measure(args, folder)
