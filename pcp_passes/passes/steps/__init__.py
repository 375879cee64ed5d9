# SPDX-License-Identifier: Apache-2.0
"""Passes on step programs: one scheduling step of target and drafter as a graph."""
