# SPDX-License-Identifier: Apache-2.0
"""Passes on the bodies of a serving engine: graphs of one step's token rows, over caches that they do not hold."""
