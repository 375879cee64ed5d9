# SPDX-License-Identifier: Apache-2.0
"""Passes on a captured graph of all tokens, which makes no use of a cache."""
