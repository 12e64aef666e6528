//! The database engines to benchmark and the size of their benchmarks.

type Settings = Vec<(String, String)>;

/// A database engine to benchmark.
pub(crate) struct Engine {
    pub(crate) name: &'static str,
    pub(crate) settings: Settings,
    /// Settings of the server that only spools its events.
    pub(crate) spooling: Settings,
    /// Whether the targets apply to it.
    pub(crate) has_targets: bool,
}

/// The size of the benchmark.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) calls: usize,
    pub(crate) namespaces: usize,
    pub(crate) seconds: usize,
}
