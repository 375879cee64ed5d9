# SPDX-License-Identifier: Apache-2.0
"""The front end of plain PyTorch: a decorator, a ``torch.compile`` backend, and executors of the rewritten graph."""
