"""What the tests share: the scripts' folder on the path, frames of real games, and a MAE trained on them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import spirl_rainbow as spirl  # noqa: E402

torch.set_num_threads(1)  # repeatable, and two runs at once do not fight over the cores

GAMES = ("ALE/Frostbite-v5", "ALE/MsPacman-v5", "ALE/Seaquest-v5", "ALE/BattleZone-v5")


@pytest.fixture(scope="session")
def random_play():
    """uint8 frames (600, 96, 96, 3) of random play of each of the paper's four games."""
    return {game: spirl.collect_random_frames(spirl.Args(env_id=game), 600) for game in GAMES}


@pytest.fixture(scope="session")
def trained_mae(random_play, tmp_path_factory):
    """A MAE of the paper's sizes, trained for three short epochs on all four games; `losses` is its curves."""
    frames = np.concatenate([random_play[game][:512:8] for game in GAMES])
    held_out = np.concatenate([random_play[game][-32:] for game in GAMES])
    torch.manual_seed(0)
    mae = spirl.MaskedAutoencoder()
    args = spirl.Args(mae_epochs=3, mae_learning_rate=4e-3)
    mae.losses = spirl.pretrain_mae(args, mae, frames, held_out, torch.device("cpu"), tmp_path_factory.mktemp("mae"))
    return mae.eval().requires_grad_(False)


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=1, help="runs that test_resume.py kills, each at a random instant")
