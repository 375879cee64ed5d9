# SPDX-License-Identifier: Apache-2.0
"""What sharding a model would cost and save, from its configuration alone: no weights, no process group, no device."""
