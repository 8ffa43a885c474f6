"""As much of a GPU as a capture needs, on a CPU: streams that wait, memory that is allocated to a
pool, and graphs that compute anew. A capture that fails leaves behind what torch leaves."""

import torch

from megabatch.passes.graphs import CapturedPass


class FakeStream:
    """Knows only who waits for whom while something is captured."""

    def __init__(self, device):
        self.device = device

    def record_event(self):
        return self

    def wait_event(self, event):
        graph = self.device.capturing
        if graph is not None and event in graph.streams:
            graph.streams.append(self)
            graph.away.add(self)

    def wait_stream(self, other):
        graph = self.device.capturing
        if graph is not None:
            assert self in graph.streams and other in graph.streams, "not of this capture"
            graph.away.discard(other)


class FakeGraph:
    """Replayed, it computes anew and writes where it wrote."""

    def __init__(self, device):
        self.device, self.memory = device, None
        self.ended = self.broken = self.replayed = False
        self.streams, self.away, self.works = [], set(), []
        device.graphs.append(self)

    def pool(self):
        if not self.ended:
            raise RuntimeError("pool() without a successful capture")
        return self.memory

    def replay(self):
        assert self.ended
        self.replayed = True
        for work, (found, gradients) in self.works:
            new_found, new_gradients = work()
            static = (*found, *gradients.values())
            for held, new in zip(static, (*new_found, *new_gradients.values()), strict=True):
                held.copy_(new)


class FakeCapture:
    """torch.cuda.graph, also in what it leaves undone when the device has broken a capture off."""

    def __init__(self, graph, *, pool, stream, capture_error_mode):
        self.graph, self.device, self.stream = graph, graph.device, stream
        graph.memory = pool

    def __enter__(self):
        self.before, self.device.present = self.device.present, self.stream
        self.device.recording.append(self.graph.memory)
        self.device.drawing = True
        self.device.capturing = self.graph
        self.graph.streams.append(self.stream)

    def __exit__(self, *_):
        self.device.capturing = None
        if self.graph.broken or self.graph.away:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.device.recording.remove(self.graph.memory)
        self.device.drawing = False
        self.graph.ended = True
        self.device.present = self.before


class FakeDevice:
    def __init__(self, monkeypatch):
        self.graphs, self.recording, self.capturing = [], [], None
        self.main = self.present = FakeStream(self)
        self.drawing = False
        """the generator thinks that something is captured"""
        self.room = 99
        """passes that a capture has memory for"""
        self.free, self.peaks = 1 << 30, [1]
        """bytes; of each pass before a capture, and then of all others"""
        if torch.cuda.is_available():
            torch.cuda.init()  # would put generators in the place of this one
        generators = dict(enumerate(torch.cuda.default_generators))
        fakes = {
            "Stream": lambda: FakeStream(self),
            "CUDAGraph": lambda: FakeGraph(self),
            "graph": FakeCapture,
            "graph_pool_handle": object,
            "current_stream": lambda: self.present,
            "stream": self.stream,
            "get_rng_state": torch.get_rng_state,
            "set_rng_state": self.set_rng_state,
            "default_generators": {None: self, **generators},
            "memory_allocated": lambda: 0,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": self.reset_peak,
            "empty_cache": lambda: None,
            "mem_get_info": lambda: (self.free, self.free),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        end = self.end_allocating
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *_: None, raising=False)
        work, device = CapturedPass._work, self

        def noted(self, way):
            graph = device.capturing
            if graph is not None and way >= device.room:
                raise torch.OutOfMemoryError("CUDA out of memory.\nAnd much more")
            buffers = [(buffer, buffer.clone()) for buffer in self._net.buffers()]
            result = work(self, way)
            device.peak = max(device.peak, device.peaks[0])
            if graph is not None:  # noted, not done
                assert device.present is graph.streams[way]
                graph.works.append((lambda: work(self, way), result))
                for buffer, before in buffers:
                    buffer.copy_(before)
            return result

        monkeypatch.setattr(CapturedPass, "_work", noted)

    @property
    def sizes(self):
        """of what was captured and replayed"""
        return [len(graph.works) for graph in self.graphs if graph.replayed]

    def is_whole(self):
        """Nothing is left of captures that failed."""
        return self.present is self.main and not self.recording and not self.drawing

    def stream(self, stream):
        device = self

        class Present:
            def __enter__(self):
                self.before, device.present = device.present, stream

            def __exit__(self, *_):
                device.present = self.before

        return Present()

    def break_off(self):
        """What asks the device for a number does not get it while something is captured."""
        if self.capturing is not None:
            self.capturing.broken = True
            raise RuntimeError("not while a stream is captured\nand much more")

    def set_rng_state(self, state):
        if self.drawing:
            raise RuntimeError("the generator is part of a capture")
        torch.set_rng_state(state)

    def clone_state(self):
        return self.drawing

    def graphsafe_set_state(self, state):
        self.drawing = state

    def end_allocating(self, _, pool):
        self.recording.remove(pool)

    def reset_peak(self):
        self.peak = 0
        self.peaks = self.peaks[1:] or self.peaks
