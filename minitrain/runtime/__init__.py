"""The process side: ranks, groups, layouts, traces."""
