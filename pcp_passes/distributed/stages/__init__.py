# SPDX-License-Identifier: Apache-2.0
"""What pipeline stages send each other: rows to the next one, and the round state back to all."""
