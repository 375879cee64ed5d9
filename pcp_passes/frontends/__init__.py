# SPDX-License-Identifier: Apache-2.0
"""One sub-package per system that graphs are captured from."""
