# SPDX-License-Identifier: Apache-2.0
"""What `examples/train_tiny.py` is made of."""
