"""Local copies of remote datasets: planned, downloaded, checked and unpacked before they are read."""
