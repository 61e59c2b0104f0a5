"""One torch thread: two threads on a contended two-core machine were 30 times slower and change the last bit."""

import torch

torch.set_num_threads(1)
