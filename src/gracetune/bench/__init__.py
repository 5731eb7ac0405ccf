"""Everything `gracetune bench` measures."""
