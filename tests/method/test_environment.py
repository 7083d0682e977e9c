"""Each rule of the environment, on a real game where a breach would show."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import spirl_rainbow as spirl


def make(game, num_envs=1, **changes):
    return spirl.make_envs(spirl.Args(env_id=f"ALE/{game}-v5", **changes), num_envs)


def changed(game, **changes):
    """`make_envs`'s environment with some settings changed, to compare with."""
    kwargs = make(game).spec.kwargs | changes
    del kwargs["vectorization_mode"], kwargs["game"]
    return gym.make_vec(f"ALE/{game}-v5", 1, "vector_entry_point", **kwargs)


def play(env, seed, actions):
    """A game from a seeded reset: arrays with an entry for the reset and one for each action."""
    observation, info = env.reset(seed=np.array([seed]))
    steps = [(observation[0, 0], 0, False, False, info["lives"][0], info["episode_frame_number"][0])]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(np.array([action]))
        outcome = (reward, terminated, truncated, info["lives"], info["episode_frame_number"])
        steps.append((observation[0, 0], *(value[0] for value in outcome)))
    names = ("frames", "rewards", "terminated", "truncated", "lives", "clock")
    return SimpleNamespace(**dict(zip(names, map(np.array, zip(*steps)))))


def random_actions(num, actions=18):
    return np.random.default_rng(0).integers(actions, size=num)


def test_a_step_gives_an_unstacked_colour_frame_and_a_raw_score_after_four_frames_of_the_games_own_actions():
    observation, _ = make("Frostbite", 3).reset(seed=np.arange(3))
    assert observation.shape == (3, 1, 96, 96, 3) and observation.dtype == np.uint8
    game = play(make("MsPacman"), 3, random_actions(200, 9))
    assert game.rewards.max() >= 10  # a pebble's ten points
    assert (np.diff(game.clock) == 4).all()
    assert make("MsPacman").single_action_space.n == 9


def test_actions_never_stick():
    """Without no-ops at the start two games are the same, whatever their seeds."""
    env, actions = changed("MsPacman", noop_max=0), random_actions(150, 9)
    assert (play(env, 1, actions).frames == play(env, 2, actions).frames).all()


def test_the_last_two_frames_are_pooled():
    """Seaquest blinks: the maximum over two frames shows what every other frame hides."""
    actions = random_actions(100)
    pooled = play(make("Seaquest"), 3, actions).frames
    single = play(changed("Seaquest", maxpool=False), 3, actions).frames
    assert (pooled >= single).all() and (pooled > single).any()


def test_up_to_29_no_ops_start_a_game():
    """Ms. Pac-Man has no FIRE, so the emulator has then played as many frames."""
    _, info = make("MsPacman", 60).reset(seed=np.arange(60))
    starts = set(info["frame_number"].tolist())
    assert len(starts) > 24 and (min(starts), max(starts)) == (0, 29)


def test_a_game_that_waits_for_fire_is_started():
    """Breakout's ball is served by FIRE alone: without it every frame is the same."""
    frames = play(make("Breakout"), 3, [0] * 20).frames
    assert (frames != frames[0]).any()


@pytest.mark.parametrize("name", ["Frostbite", "Seaquest", "MsPacman", "BattleZone", "Frogger", "Turmoil"])
def test_a_life_loss_shows_in_the_lives_and_the_flags_are_of_games(name):
    """Frogger and Turmoil play on with no lives left."""
    env = make(name)
    game = play(env, 3, random_actions(1200, int(env.single_action_space.n)))
    over = game.terminated.argmax()  # the first end
    losses = 1 + np.flatnonzero(np.diff(game.lives[: over + 1]) < 0)
    assert len(losses) == game.lives[0] >= 3  # several lives were played, one after the other
    assert (losses[-1] < over) == (name in ("Frogger", "Turmoil")) and not game.truncated[: over + 1].any()
    assert (np.diff(game.clock[: over + 1]) > 0).all()  # and the game's clock goes on
    assert game.clock[over + 1] < game.clock[over] and game.rewards[over + 1] == 0  # a new one, by a step of no reward


def test_a_cut_off_game_is_truncated_and_not_terminated():
    game = play(make("BattleZone", max_episode_frames=400), 3, [0] * 101)
    end = game.truncated.argmax()
    assert end == 100 and game.clock[end] > 400  # after 400 frames; the no-ops before them are not counted
    assert not game.terminated[: end + 1].any() and game.lives[end] == 5  # no life was lost


def test_seeds_differ_by_run_purpose_and_game():
    purposes = (spirl.COLLECT, spirl.PLAY, spirl.EVALUATE)
    drawn = np.concatenate([spirl.game_seeds(seed, purpose, num=50) for seed in range(1, 21) for purpose in purposes])
    assert drawn.dtype == np.int64 and drawn.min() >= 0 and drawn.max() < 2**31
    assert len(set(drawn)) == len(drawn) == 3000  # runs with adjacent seeds share no seed
    assert spirl.game_seeds(1, spirl.PLAY, 0) != spirl.game_seeds(1, spirl.PLAY, 1)


@pytest.mark.parametrize("name, max_episode_frames, num_frames", [("Frostbite", 500, 700), ("Pong", 10**5, 1300)])
def test_collection_plays_first_lives_each_from_its_seed(name, max_episode_frames, num_frames):
    args = spirl.Args(env_id=f"ALE/{name}-v5", seed=4, max_episode_frames=max_episode_frames)
    frames, rng = spirl.collect_random_frames(args, num_frames), np.random.default_rng([4, spirl.COLLECT])
    env, ends = spirl.make_envs(args, 1), []
    observation, _ = env.reset(seed=spirl.game_seeds(4, spirl.COLLECT, 0))
    for frame in frames:
        assert (frame.numpy() == observation[0, 0]).all()
        observation, _, terminated, truncated, info = env.step(rng.integers(env.single_action_space.n, size=1))
        # As soon as one of Frostbite's four lives is lost; in Pong, which has none, at the end.
        if truncated[0] or terminated[0] or 0 < info["lives"][0] < 4:
            ends.append(bool(truncated[0]))
            observation, _ = env.reset(seed=spirl.game_seeds(4, spirl.COLLECT, len(ends)))
    assert set(ends) == ({False, True} if name == "Frostbite" else {False})  # some games are cut off before


class FirstPixels(torch.nn.Module):
    """A fixed stand-in policy that needs no training: a linear map of a few pixels of the stack."""

    def __init__(self, actions):
        super().__init__()
        self.weight = torch.randn(4 * 32, actions, generator=torch.Generator().manual_seed(0))

    def q_values(self, frames, counts):
        return (frames * counts[:, :, None]).flatten(1).float() @ self.weight


def read_pixels(frames):
    frames = torch.from_numpy(frames)[:, 1::12, 1::24, 0].reshape(len(frames), -1)
    return frames.half(), torch.ones(len(frames)).long()


def oracle_game(args, policy, seed):
    """One whole game, alone, step by step: its raw score, its length, and the lengths at which a life was lost. A lost
    life changes nothing in the stack. Its random actions are those of a game played alone."""
    env, rng = spirl.make_envs(args, 1), np.random.default_rng([args.seed, spirl.EVALUATE])
    observation, info = env.reset(seed=np.array([seed]))
    stack, counts = [torch.zeros(1, 32).half()] * 4, [0, 0, 0, 0]
    score, length, losses, terminated = 0, 0, [], [False]
    while not terminated[0] and 4 * length < args.max_episode_frames:
        stack, counts = stack[1:] + [read_pixels(observation[:, 0])[0]], counts[1:] + [1]
        action = policy.q_values(torch.stack(stack, 1), torch.tensor([counts])).argmax(1).numpy()
        random_action = rng.integers(env.single_action_space.n, size=1)
        if rng.random() < args.eval_epsilon:
            action = random_action
        lives = info["lives"][0]
        observation, reward, terminated, _, info = env.step(action)
        score, length = score + int(reward[0]), length + 1
        losses += [length] if info["lives"][0] < lives else []
    return score, length, losses


def test_evaluation_plays_each_game_once_to_its_end():
    args = spirl.Args(env_id="ALE/MsPacman-v5", seed=5, max_episode_frames=2240, eval_episodes=4, eval_epsilon=0.0)
    policy = FirstPixels(9).train()
    games = [oracle_game(args, policy, seed) for seed in spirl.game_seeds(5, spirl.EVALUATE, num=4)]
    expected, lengths, losses = map(list, zip(*games))
    assert all(losses) and len(set(lengths)) > 2  # each goes on after a lost life, and some longer than others
    batches = []

    def preprocess(frames):
        assert not policy.training  # noise off
        batches.append(len(frames))
        return read_pixels(frames)

    scores, recording = spirl.evaluate(args, policy, preprocess)
    assert scores == expected and len(set(scores)) > 1
    assert batches == [sum(length > t for length in lengths) for t in range(max(lengths))]  # only games that go on
    assert policy.training
    counts_later = [int(counts.sum()) for _, (_, counts) in recording[3:]]
    assert counts_later == [4] * (lengths[0] - 3)  # a lost life blanks nothing
    frame, (stack, counts) = recording[2]
    assert frame.shape == (96, 96, 3) and counts.tolist() == [[0, 1, 1, 1]]
    assert torch.equal(stack[0, 3], read_pixels(frame[None])[0][0])


def test_in_each_step_of_an_evaluation_some_games_play_at_random_and_others_do_not(monkeypatch):
    args = spirl.Args(max_episode_frames=400, eval_episodes=4, eval_epsilon=0.3)
    envs, policy, taken = spirl.make_envs(args, 4), FirstPixels(18), []
    policy.weight.zero_()  # the greedy action is 0
    step = envs.step
    monkeypatch.setattr(envs, "step", lambda actions: taken.append(actions.copy()) or step(actions))
    monkeypatch.setattr(spirl, "make_envs", lambda *_: envs)
    spirl.evaluate(args, policy, read_pixels)
    moved = np.array(taken) > 0
    assert 0.2 < moved.mean() < 0.37  # 0.3 * 17 / 18
    assert (moved.any(1) & ~moved.all(1)).mean() > 0.5


@pytest.mark.parametrize("name, actions", [("MsPacman", 9), ("Frogger", 5)])
def test_a_game_is_scored_to_its_end(name, actions):
    """MsPacman is cut off at the step that loses a life; Frogger plays on with no lives left."""
    args, policy = spirl.Args(env_id=f"ALE/{name}-v5", eval_episodes=1, eval_epsilon=0.6), FirstPixels(actions)
    seed = spirl.game_seeds(1, spirl.EVALUATE)[0]
    score, length, losses = oracle_game(args, policy, seed)
    if name == "MsPacman":
        args.max_episode_frames = 4 * losses[0]
        score, length, losses = oracle_game(args, policy, seed)
    assert (losses[-1] == length) == (name == "MsPacman")
    scores, recording = spirl.evaluate(args, policy, read_pixels)
    assert scores == [score] and len(recording) == length
