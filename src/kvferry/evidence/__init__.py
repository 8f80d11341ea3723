"""What every measurement needs: statistics with intervals, and results on disk as they come."""
