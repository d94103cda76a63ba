"""What ours is measured beside: other libraries, each optional, found when a run begins."""
