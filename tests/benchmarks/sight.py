"""Ms. Pac-Man: how many patches does a MAE find salient as the maze is eaten, and are the ghosts among them?

    python tests/benchmarks/sight.py                                        # the MAE of tests/weights/, some minutes
    python tests/benchmarks/sight.py tests/weights/MsPacman.pt other.pt     # others, or several

plays games of the trained agent of `tests/weights/`, and looks at every sixth frame with each MAE. Where the ghosts
are, and how many dots are eaten, stands in the console's memory, at the addresses that Anand et al. 2019 ("Unsupervised
State Representation Learning in Atari") found. A ghost is kept if the patch is in which its centre lies.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import ale_py
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import spirl_rainbow  # noqa: E402

GAME = "ALE/MsPacman-v5"
X, Y = [10, 6, 7, 8, 9], [16, 12, 13, 14, 15]  # addresses of the places of Ms. Pac-Man, Sue, Inky, Pinky and Blinky
DOTS_EATEN = 119  # address
MAX_PATCHES = 43  # the agent's maximum: 30 % of 144


@dataclass
class Args:
    maes: tyro.conf.Positional[tuple[Path, ...]] = (Path("tests/weights/MsPacman.pt"),)  # mae.pt files of Ms. Pac-Man
    games: int = 3  # games to play; they differ by the one action in a thousand that is random
    seed: int = 0  # seed of those actions


def load(path):
    mae = spirl_rainbow.MaskedAutoencoder()
    spirl_rainbow.load_mae(path, mae, spirl_rainbow.Args(env_id=GAME))
    return mae.eval().requires_grad_(False)


def area_weights(old, new):
    """(new, old): the share of each new pixel that comes from each old one, where a side is resized by area, as ale-py
    does it."""
    edges = np.arange(new + 1) * old / new
    pixels = np.arange(old)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return overlap.clip(0) * new / old


@torch.no_grad()
def play(games, seed):
    """Of each sixth frame: pixels (B, 96, 96, 3), places (B, 5) of Ms. Pac-Man and the ghosts as patch ids, -1 for one
    that is not in the maze, and how many dots are eaten (B,)."""
    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(ale_py.roms.get_rom_path("ms_pacman"))
    actions = ale.getMinimalActionSet()
    agent = torch.load(ROOT / "tests/weights/MsPacman_agent.pt", weights_only=True)
    network = spirl_rainbow.RainbowNetwork(spirl_rainbow.SalientPatchTransformer(), 128, len(actions)).eval()
    network.load_state_dict(agent["model"])
    mae = load(ROOT / "tests/weights/MsPacman.pt")  # the agent's
    error_map = spirl_rainbow.ErrorMapCache(mae)
    down, across = area_weights(210, 96), area_weights(160, 96)
    rng = np.random.default_rng(seed)
    frames, places, dots = [], [], []
    for _ in range(games):
        ale.reset_game()
        embeddings = torch.zeros(1, 4, MAX_PATCHES, 64)
        counts = torch.zeros(1, 4, dtype=torch.int64)
        action, step, score = 0, 0, 0
        while not ale.game_over():
            score += sum(ale.act(actions[action]) for _ in range(3))
            screen = ale.getScreenRGB()
            score += ale.act(actions[action])
            screen = np.maximum(screen, ale.getScreenRGB()).astype(float)
            frame = np.einsum("oi,ijc,pj->opc", down, screen, across, optimize=True).round().astype(np.uint8)
            step += 1

            embedding, count = spirl_rainbow.embed_salient_patches(mae, error_map, MAX_PATCHES, 0.5, frame[None])
            embeddings = torch.cat([embeddings[:, 1:], embedding[:, None]], 1)
            counts = torch.cat([counts[:, 1:], count[:, None]], 1)
            action = int(network.q_values(embeddings, counts).argmax())
            if rng.random() < 0.001:
                action = int(rng.integers(len(actions)))

            if step > 66 and step % 6 == 0:  # at first a tune plays
                ram = ale.getRAM().astype(int)
                column = ((ram[X] - 8.5) * 96 / 160 // 8).astype(int)
                row = ((ram[Y] + 6) * 96 / 210 // 8).astype(int)
                in_maze = (column >= 0) & (column < 12) & (row >= 0) & (row < 10)
                frames.append(frame)
                places.append(np.where(in_maze, 12 * row + column, -1))
                dots.append(ram[DOTS_EATEN])
        print(f"a game of {score} points, {step} steps")
    return torch.from_numpy(np.stack(frames)), np.array(places), np.array(dots)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    maes = {path: load(path) for path in args.maes}
    frames, places, dots = play(args.games, args.seed)
    print("\n| MAE | dots eaten | frames | median of K without a maximum | above 43 | kept: Ms. Pac-Man | ghosts |")
    print("|---|---|---|---|---|---|---|")
    for path, mae in maes.items():
        error_map = spirl_rainbow.ErrorMapCache(mae)
        errors = torch.cat([error_map(batch) for batch in frames.split(16)])
        _, free = spirl_rainbow.select_salient_patches(errors, mae.num_patches)
        patch_ids, count = spirl_rainbow.select_salient_patches(errors, MAX_PATCHES)
        kept = [np.isin(place, ids[:k]) for place, ids, k in zip(places, patch_ids, count)]
        kept = np.where(places >= 0, kept, np.nan)  # (B, 5)
        for low, high in ((0, 19), (20, 39), (40, 79), (80, 250)):
            rows = (dots >= low) & (dots <= high)
            if rows.any():
                k = free[rows].double()
                above = (k > MAX_PATCHES).double().mean()
                player, ghosts = np.nanmean(kept[rows, 0]), np.nanmean(kept[rows, 1:])
                cells = f"{low} to {high} | {rows.sum()} | {k.median():.0f} | {above:.0%} | {player:.2f} | {ghosts:.2f}"
                print(f"| {path} | {cells} |")
