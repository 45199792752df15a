# Deep Q-learning: a memory of what happened, a network that follows slowly, a step only once the memory is full.
import argparse
import math
import random
from collections import deque, namedtuple
from itertools import count

import torch
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--output", default="dqn.pt")
args = parser.parse_args()

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
BATCH_SIZE, GAMMA, EPS_START, EPS_END, EPS_DECAY, TAU, LR = 16, 0.9, 0.9, 0.05, 100, 0.05, 1e-2
random.seed(0)
torch.manual_seed(0)


class Walk:
    def reset(self):
        self.place, self.time = 0.0, 0
        return torch.tensor([self.place, 1.0])

    def step(self, action):
        self.place += 1.0 if action == 1 else -1.0
        self.time += 1
        return torch.tensor([self.place, 1.0]), (1.0 if action == 1 else 0.0), self.time == 8


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        """Save a transition"""
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 16)
        self.layer2 = nn.Linear(16, n_actions)

    def forward(self, x):
        return self.layer2(torch.relu(self.layer1(x)))


env = Walk()
policy_net = DQN(2, 2)
target_net = DQN(2, 2)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
memory = ReplayMemory(200)
steps_done = 0


def select_action(state):
    global steps_done
    eps_threshold = EPS_END + (EPS_START - EPS_END) * math.exp(-1.0 * steps_done / EPS_DECAY)
    steps_done += 1
    if random.random() > eps_threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(2)]])


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    batch = Transition(*zip(*memory.sample(BATCH_SIZE)))
    non_final_mask = torch.tensor([s is not None for s in batch.next_state])
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_action_values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    next_state_values = torch.zeros(BATCH_SIZE)
    with torch.no_grad():
        next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
    expected = next_state_values * GAMMA + torch.cat(batch.reward)
    loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
    # Optimize the model
    optimizer.zero_grad()
    loss.backward()
    # In-place gradient clipping
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


for i_episode in range(12):
    state = env.reset().unsqueeze(0)
    for t in count():
        action = select_action(state)
        observation, reward, done = env.step(action.item())
        next_state = None if done else observation.unsqueeze(0)
        memory.push(state, action, next_state, torch.tensor([reward]))
        state = next_state

        # Perform one step of the optimization (on the policy network)
        optimize_model()

        # Soft update of the target network's weights
        with torch.no_grad():
            for target, source in zip(target_net.parameters(), policy_net.parameters()):
                target.lerp_(source, TAU)
        if done:
            print(f"episode {i_episode}: {env.place}")
            break

torch.save(policy_net.state_dict(), args.output)
