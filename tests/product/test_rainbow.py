"""spirl_rainbow.py, as a user runs it, on tiny budgets of real games."""

import json
import platform
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import LOADED, ROOT, SMALL, finished, in_background, run_here, scalars
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import spirl_rainbow as spirl


@in_background
def small_run(folder):
    """The 100K setting in small, with evaluation at the end, on Frostbite."""
    return finished(folder, "first", *SMALL, "--total-timesteps", "240", "--capture-video")


def test_a_run_leaves_what_the_readme_says(small_run):
    path, results = small_run
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and "tfevents" not in file.name}
    assert names == {"args.json", "mae.pt", "agent.pt", "results.json", "figures/policy_attention.png",
                     "videos/policy.gif"}
    assert json.loads((path / "args.json").read_text())["total_timesteps"] == 240
    assert results["steps"] == 240 and results["updates"] == 120 and results["seed"] == 1
    assert results["env_id"] == "ALE/Frostbite-v5" and results["method"] == "spirl"
    assert len(results["scores"]) == 3 and [(e["step"], e["scores"]) for e in results["evaluations"]] == [
        (240, results["scores"])]
    assert results["mean"] == pytest.approx(np.mean(results["scores"]))
    assert results["median"] == pytest.approx(np.median(results["scores"]))
    assert results["std"] == pytest.approx(np.std(results["scores"], ddof=1))
    assert results["protocol"].startswith("mean of the final weights")
    assert results["max_patches"] == 12  # int(36 * 35 %)
    mae, agent = (torch.load(path / name, weights_only=True) for name in ("mae.pt", "agent.pt"))
    assert mae["sizes"]["image_size"] == 48 and mae["env_id"] == "ALE/Frostbite-v5"
    assert agent["step"] == 240 and agent["model"]["support"].shape == (51,)
    assert (path / "videos/policy.gif").read_bytes()[:6] == b"GIF89a"


def test_tensorboard_has_the_curves(small_run):
    path, results = small_run
    curves = scalars(path)
    assert curves.keys() == {"charts/episodic_return", "losses/loss", "losses/grad_norm", "losses/q_values", "charts/K",
                             "charts/SPS", "eval/mean", "eval/median"}
    assert [step for step, _ in curves["charts/SPS"]] == [99, 199]
    assert curves["charts/episodic_return"] == [tuple(pair) for pair in results["training_scores"]]
    assert [step for step, _ in scalars(path / "mae")["mae/loss"]] == [0, 1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs Linux's C library")
def test_freed_memory_is_kept():
    """Pieces of 31 MB come from the heap, not from places apart, and it stays as long as it was when they are freed."""
    code = """
import torch, spirl_rainbow as spirl

def heap():
    line = next(line for line in open("/proc/self/maps") if "[heap]" in line)
    return range(*(int(end, 16) for end in line.split()[0].split("-")))

spirl.keep_freed_memory()
pieces = [torch.ones(31 * 2**18) for _ in range(10)]
inside, length = [piece.data_ptr() in heap() for piece in pieces], len(heap())
del pieces
assert all(inside) and len(heap()) == length, (inside, length, len(heap()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_trained_agent_is_watched_and_nothing_is_learned(tmp_path, small_run, monkeypatch):
    path, results = small_run
    flags = [*LOADED, "--mae-checkpoint", path / "mae.pt", "--agent-checkpoint", path / "agent.pt", "--capture-video"]
    end = run_here(tmp_path, monkeypatch, *flags, "--run-name", "watched")
    watched = tmp_path / "runs/watched"
    again = json.loads((watched / "results.json").read_text())
    assert again["scores"] == results["scores"] and again["steps"] == 240 and again["updates"] == 0
    weights = torch.load(path / "agent.pt", weights_only=True)["model"]
    assert all(torch.equal(value, weights[name]) for name, value in end["online"].state_dict().items())
    names = {str(file.relative_to(watched)) for file in watched.rglob("*") if file.is_file() and "tfevents" not in str(file)}
    assert names == {"args.json", "mae.pt", "agent.pt", "results.json", "figures/policy_attention.png",
                     "videos/policy.gif"}
    assert (watched / "videos/policy.gif").read_bytes()[:6] == b"GIF89a"


def oracle_slots(args, steps):
    """What the replay must hold after `steps` random steps, a dict a slot, and (step, raw score) of each game.

    A life loss ends the return and starts a stack, but the game goes on, until it says that it is over or its frames
    are counted out; a cut-off game's last frame has a slot without an action, but where a life is lost just there; the
    step of the automatic reset is neither played nor counted; rewards are clipped.
    """
    envs = spirl.make_envs(args, 1)
    actions = np.random.default_rng([args.seed, spirl.ACT]).integers(envs.single_action_space.n, size=steps)
    slots, games, score, starts, length = [], [], 0.0, True, 0
    observation, info = envs.reset(seed=spirl.game_seeds(args.seed, spirl.PLAY, 0))
    for step, action in enumerate(actions.tolist()):
        frame, lives, length = observation[0, 0], info["lives"][0], length + 1
        observation, reward, terminated, _, info = envs.step(np.array([action]))
        life_lost = bool(terminated[0]) or bool(info["lives"][0] < lives)
        slots.append({"frame": frame, "starts": starts, "action": action, "ended": life_lost,
                      "reward": max(-1.0, min(1.0, float(reward[0])))})
        score, starts = score + float(reward[0]), life_lost
        if terminated[0] or 4 * length >= args.max_episode_frames:
            if not life_lost:
                slots.append({"frame": observation[0, 0], "starts": False, "action": -1, "ended": False, "reward": 0.0})
            games.append((step, score))
            score, starts, length = 0.0, True, 0
            observation, info = envs.reset(seed=spirl.game_seeds(args.seed, spirl.PLAY, len(games)))
    slots.append({"frame": observation[0, 0], "starts": starts, "action": -1, "ended": False, "reward": 0.0})
    return slots, games


@pytest.mark.parametrize("game, max_frames, cut_off, steps", [
    ("MsPacman", 3000, False, 700),
    ("MsPacman", 900, True, 680),
    ("MsPacman", 708, False, 300),  # a life is lost in the very step that is cut off
    ("Frogger", 3000, False, 400),  # plays on after its last life
])
def test_the_replay_holds_what_the_game_played(tmp_path, monkeypatch, game, max_frames, cut_off, steps):
    end = run_here(tmp_path, monkeypatch, *SMALL, "--env-id", f"ALE/{game}-v5", "--max-ratio", "0.3", "--total-timesteps", steps + 1,
                   "--learning-starts", steps, "--buffer-size", 800, "--max-episode-frames", max_frames,
                   "--eval-episodes", 1, "--image-size", 32, "--run-name", "here")
    args = spirl.Args(env_id=f"ALE/{game}-v5", image_size=32, max_episode_frames=max_frames)
    slots, games = oracle_slots(args, steps)
    assert end["run"].training_scores[: len(games)] == games and len(games) >= 1
    assert any(slot["action"] < 0 for slot in slots[:-1]) == cut_off
    assert sum(slot["ended"] for slot in slots) >= (1 if max_frames == 708 else 3) and max(slot["reward"] for slot in slots) == 1.0
    replay, known = end["replay"], len(slots) - 1  # the last one has got its action by now
    for name, field in (("action", "actions"), ("ended", "ended"), ("reward", "rewards")):
        assert getattr(replay, field)[:known].tolist() == [slot[name] for slot in slots[:known]], name
    assert replay.life_ids[:known].tolist() == (np.cumsum([slot["starts"] for slot in slots[:known]]) - 1).tolist()
    for t, slot in enumerate(slots[:known]):  # drawn from when its n steps, or the end of its life or game, are known
        ended = any(later["starts"] for later in slots[t + 1 : t + 21]) or slot["ended"]
        assert (replay.priorities[t] > 0).item() == (slot["action"] >= 0 and (ended or t + 20 <= known + 1)), t
    assert not cut_off or steps - games[-1][0] < 20  # some of them would wait for a step that never follows
    slots, kept = slots[::4], torch.arange(0, len(slots), 4)
    frames = torch.from_numpy(np.stack([slot["frame"] for slot in slots]))
    plain = torch.cat([spirl.reconstruction_error_map(end["mae"], batch) for batch in frames.split(64)])
    patch_ids, count = spirl.select_salient_patches(plain, end["max_patches"])
    same = replay.counts[kept] == count
    assert same.float().mean() > 0.99  # two slopes can be as good as equally close
    embeddings = spirl.encode_patches(end["mae"], frames[same], patch_ids[same], count[same])
    close = (replay.frames[kept][same].float() - embeddings).abs().amax((1, 2)) < 0.01  # kept as float16
    assert close.float().mean() > 0.99  # as can be two patches' errors, whose order then differs


def test_the_loop_acts_learns_copies_and_keeps_the_best(tmp_path, small_run, monkeypatch):
    """Seen from outside: PyTorch calls hooks at each pass of a network and at each step of an optimiser."""
    acted, betas, evaluated, played, games = [], {}, {}, [], []
    make_vec = gym.make_vec

    def watched(*args, **kwargs):  # the first environment is the one that trains
        env = make_vec(*args, **kwargs)
        reset, trains = env.reset, not played
        env.reset = lambda seed: (games.append((trains, *seed.tolist())), reset(seed=seed))[1]
        if not played:
            played.append(None)
            step = env.step
            env.step = lambda action: (played.append(int(action[0])), step(action))[1]
        return env

    def passed(network, inputs, log_probs):
        if type(network).__name__ != "RainbowNetwork":
            return
        loop = vars(sys.modules["__main__"])
        if network.training and len(log_probs) == 1:
            noise = torch.cat([value.flatten() for name, value in network.named_buffers() if "noise" in name])
            best = int((log_probs.exp() * network.support).sum(2).argmax())
            acted.append((loop["step"], network is loop["online"], best, noise.clone()))
        elif not network.training:
            evaluated.setdefault(loop["eval_step"], {name: v.clone() for name, v in network.state_dict().items()})

    def stepped(optimizer, *args):
        loop = vars(sys.modules["__main__"])
        if "beta" in loop:
            betas[loop["step"]] = loop["beta"]

    monkeypatch.setattr(gym, "make_vec", watched)
    hooks = [register_module_forward_hook(passed), register_optimizer_step_post_hook(stepped)]
    try:
        end = run_here(tmp_path, monkeypatch, *LOADED, "--mae-checkpoint", small_run[0] / "mae.pt", "--run-name",
                       "watched", "--total-timesteps", 200, "--train-frequency", 4, "--eval-frequency", 40,
                       "--target-update-frequency", 10, "--max-episode-frames", 240, "--eval-episodes", 2,
                       "--eval-epsilon", 0.5, "--learning-rate", 0.01)
    finally:
        for hook in hooks:
            hook.remove()
    # After 120 random steps each action is the best one under the noise that the last update left, and no other's.
    assert [step for step, *_ in acted] == list(range(120, 200)) and all(own for _, own, *_ in acted)
    assert [best for _, _, best, _ in acted] == played[121:201]
    for (_, *_, before), (step, *_, now) in zip(acted, acted[1:]):
        assert torch.equal(before, now) == (step % 4 != 1), step  # an update in each fourth step
    assert betas == {step: pytest.approx(0.4 + 0.6 * (step - 120) / 80) for step in range(120, 200, 4)}
    # Each game that is trained on has a seed of its own; each evaluation plays the same two games, and none of those.
    trained_on = [seed for trains, *seeds in games if trains for seed in seeds]
    evaluated_on = [seed for trains, *seeds in games if not trains for seed in seeds]
    assert trained_on == [int(spirl.game_seeds(1, spirl.PLAY, n)[0]) for n in range(len(end["run"].training_scores) + 1)]
    assert evaluated_on == 5 * spirl.game_seeds(1, spirl.EVALUATE, num=2).tolist() and len(trained_on) > 2
    # After 20 updates the target network is the online one, but for its noise.
    weights = [{name: value for name, value in end[network].state_dict().items() if "noise" not in name}
               for network in ("online", "target")]
    assert end["run"].updates == 20 and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # The report is about the weights that had the largest median, as they were then.
    path = tmp_path / "runs/watched"
    evaluations = json.loads((path / "results.json").read_text())["evaluations"]
    best = max(evaluations, key=lambda evaluation: np.median(evaluation["scores"]))
    agent = torch.load(path / "agent.pt", weights_only=True)
    assert len({evaluation["median"] for evaluation in evaluations}) > 1
    assert agent["step"] == best["step"] and evaluated.keys() == {40, 80, 120, 160, 200}
    assert all(torch.equal(agent["model"][name], value) for name, value in evaluated[best["step"]].items())
    assert not torch.equal(evaluated[120]["trunk.project.weight"], evaluated[200]["trunk.project.weight"])


@in_background
def other_settings(folder):
    """Frostbite with masked padding; MsPacman with a [pad] token and mean pooling in the 400K setting's regime."""
    short = ["--max-episode-frames", "300", "--eval-episodes", "2", "--total-timesteps", "160"]
    return (finished(folder, "mask", *SMALL, *short, "--padding", "mask", "--mae-mask-spread", "0.2"),
            finished(folder, "token", *SMALL, *short, "--padding", "token", "--pooling", "mean", "--env-id",
                     "ALE/MsPacman-v5", "--train-frequency", "4", "--eval-frequency", "80"))


def test_paddings_poolings_and_both_settings(other_settings):
    (_, first), (_, second) = other_settings
    assert first["updates"] == 40
    assert second["updates"] == 10 and second["protocol"].startswith("best median")
    assert [evaluation["step"] for evaluation in second["evaluations"]] == [80, 160]
    best = max(second["evaluations"], key=lambda evaluation: np.median(evaluation["scores"]))
    assert second["scores"] == best["scores"] and second["median"] == np.median(best["scores"])


def test_fixed_selection_on_a_game_without_an_adopted_ratio(tmp_path, monkeypatch):
    end = run_here(tmp_path, monkeypatch, *SMALL, "--env-id", "ALE/Pong-v5", "--total-timesteps", 130, "--selection",
                   "fixed", "--eval-episodes", 1, "--max-episode-frames", 400, "--run-name", "pong")
    counted = torch.load(tmp_path / "runs/pong/mae.pt", weights_only=True)["salient_counts"]
    assert counted["lorenz_slope"] == 0.5 and len(counted["counts"]) == 64
    assert end["max_patches"] == spirl.ratio_to_patches(spirl.ideal_max_ratio(counted["counts"], 36), 36)
    assert set(end["replay"].counts[:130].tolist()) == {end["max_patches"]}
    assert end["run"].updates == 10


def test_the_target_network_begins_as_a_copy_of_the_online_one(tmp_path, small_run, monkeypatch, capsys):
    end = run_here(tmp_path, monkeypatch, *LOADED, "--mae-checkpoint", small_run[0] / "mae.pt", "--run-name", "few",
                   "--total-timesteps", 123, "--eval-episodes", 1, "--max-episode-frames", 100)
    assert "runs/few; if stopped: --resume runs/few\n" in capsys.readouterr().out
    torch.manual_seed(1)
    first = spirl.RainbowNetwork(spirl.SalientPatchTransformer(), 128, 18)  # the run's first random weights
    online, target = dict(end["online"].named_parameters()), dict(end["target"].named_parameters())
    assert end["run"].updates == 3  # too few for another copy
    assert all(torch.equal(target[name], p) for name, p in first.named_parameters())
    assert not any(torch.equal(online[name], p) for name, p in first.named_parameters())


def test_a_run_stops_at_what_is_not_finite_and_keeps_the_checkpoint_before(tmp_path, small_run, monkeypatch):
    flags = [*LOADED, "--mae-checkpoint", small_run[0] / "mae.pt", "--total-timesteps", 200, "--run-name", "diverged"]
    with pytest.raises(RuntimeError, match="non-finite"):
        run_here(tmp_path, monkeypatch, *flags, "--learning-rate", 2e9, "--checkpoint-frequency", 20)
    checkpoint = torch.load(tmp_path / "runs/diverged/checkpoint.pt", weights_only=True)
    assert checkpoint["run"]["saved_step"] == 120  # after the last random step
    assert all(value.isfinite().all() for value in checkpoint["online"].values())


def test_evaluation_adds_nothing_to_the_cache_of_training(tmp_path, small_run, monkeypatch):
    flags = [*LOADED, "--mae-checkpoint", small_run[0] / "mae.pt", "--total-timesteps", 125, "--eval-episodes", 1,
             "--max-episode-frames", 200]
    seldom = run_here(tmp_path, monkeypatch, *flags, "--run-name", "seldom")
    often = run_here(tmp_path, monkeypatch, *flags, "--run-name", "often", "--eval-frequency", 50)
    assert list(seldom["error_map"].errors) == list(often["error_map"].errors)
    added = often["eval_error_map"].errors.keys() - often["error_map"].errors.keys()
    assert added and often["error_map"].errors.items() <= often["eval_error_map"].errors.items()


@in_background
def seldom_and_often_evaluated(folder):
    """The same training twice, evaluated once and three times."""
    flags = [*SMALL, "--total-timesteps", "135", "--learning-starts", "30", "--max-episode-frames", "200",
             "--eval-episodes", "1"]
    return finished(folder, "seldom", *flags), finished(folder, "often", *flags, "--eval-frequency", "50")


def test_evaluating_does_not_change_training(seldom_and_often_evaluated):
    (seldom, once), (often, several) = seldom_and_often_evaluated
    assert [evaluation["step"] for evaluation in several["evaluations"]] == [50, 100, 135]
    assert once["training_scores"] == several["training_scores"]
    assert once["scores"] == several["evaluations"][-1]["scores"]
    curves = scalars(seldom), scalars(often)
    for name in ("losses/loss", "losses/grad_norm", "losses/q_values", "charts/K"):
        assert curves[0][name] == curves[1][name]  # bit for bit, a hundred updates on
