# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a real model and a real prompt, both from packages, without a download at run time."""
