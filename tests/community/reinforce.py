# Policy gradient: an episode is played, the sum of its rewards weighs the logarithms of what was done.
import argparse
from collections import deque
from itertools import count

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F

parser = argparse.ArgumentParser(description="REINFORCE example")
parser.add_argument("--output", default="policy.pt")
parser.add_argument("--gamma", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--log-interval", type=int, default=10)
args = parser.parse_args()


class Walk:
    """Go left or right on a line; the goal is on the right."""

    reward_threshold = 6.0

    def reset(self):
        self.place, self.time = 0.0, 0
        return torch.tensor([self.place, 1.0])

    def step(self, action):
        self.place += 1.0 if action == 1 else -1.0
        self.time += 1
        return torch.tensor([self.place, 1.0]), (1.0 if action == 1 else 0.0), self.time == 8


env = Walk()
torch.manual_seed(args.seed)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 16)
        self.affine2 = nn.Linear(16, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
eps = 1e-6


def select_action(state):
    state = state.float().unsqueeze(0)
    probs = policy(state)
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R = 0
    policy_loss = []
    returns = deque()
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


def main():
    running_reward = 1
    for i_episode in count(1):
        state, ep_reward = env.reset(), 0
        for t in range(1, 10000):  # Don't infinite loop while learning
            action = select_action(state)
            state, reward, done = env.step(action)
            policy.rewards.append(reward)
            ep_reward += reward
            if done:
                break

        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        finish_episode()
        if i_episode % args.log_interval == 0:
            print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.2f}")
        if running_reward > env.reward_threshold:
            print(f"Solved! Running reward {running_reward}, the last episode has {t} steps.")
            break


if __name__ == "__main__":
    main()
    torch.save(policy.state_dict(), args.output)
