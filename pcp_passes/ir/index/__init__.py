# SPDX-License-Identifier: Apache-2.0
"""Values of integer tensors as expressions: what positions, masks and index arithmetic say, without running them."""
