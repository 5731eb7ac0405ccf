"""Living with upstreams: what we hold on to in SimpleTuner and ai-toolkit, whether it is there, how it is started."""
