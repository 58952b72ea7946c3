"""Flower as the post: SuperLink and SuperNodes carry packets, two small apps hand them on; only here is it known."""
