//! Command line arguments.

use std::path::PathBuf;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(about = "Benchmarks muster and prints one table; exits with 1 if a target is missed")]
pub(crate) struct Arguments {
    /// Make a tenth of the requests
    #[arg(long)]
    pub(crate) quick: bool,
    /// Run only the benchmarks of uploads and downloads
    #[arg(long)]
    pub(crate) images: bool,
    /// Run only the benchmarks of instances, on simulated nodes and on this host
    #[arg(long)]
    pub(crate) instances: bool,
    /// Run only the benchmark of many open pages of the web UI
    #[arg(long)]
    pub(crate) pages: bool,
    /// Run only the benchmark of logins with a supplied secret
    #[arg(long)]
    pub(crate) logins: bool,
    /// Run only the benchmarks of identity token exchanges
    #[arg(long)]
    pub(crate) exchanges: bool,
    /// Run only the benchmark of ten daemons with 10, 100 and 1000 simulated nodes on one MariaDB
    #[arg(long)]
    pub(crate) scale: bool,
    /// Draw the results of --scale to an SVG file
    #[arg(long, value_name = "PATH", requires = "scale")]
    pub(crate) plot: Option<PathBuf>,
    /// Run only the benchmarks of the agent in real guests
    #[arg(long)]
    pub(crate) agent: bool,
    /// Skip MariaDB
    #[arg(long)]
    pub(crate) sqlite: bool,
    /// The disk image of real instances
    #[arg(long, value_name = "PATH", default_value = "target/image/tiny.qcow2")]
    pub(crate) image: PathBuf,
    /// Benchmark real networks, in the current network namespace
    #[arg(long, hide = true)]
    pub(crate) real_networks: bool,
    /// Benchmark real instances, with all data in this directory, in the current network namespace
    #[arg(long, hide = true, value_name = "DIRECTORY")]
    pub(crate) real_instances: Option<PathBuf>,
    /// Benchmark real agents, with all data in this directory, in the current network namespace
    #[arg(long, hide = true, value_name = "DIRECTORY")]
    pub(crate) real_agents: Option<PathBuf>,
    /// The server program [default: muster next to this program]
    #[arg(long, value_name = "PATH")]
    pub(crate) server: Option<PathBuf>,
}

impl Arguments {
    /// Returns whether this is a child process in a namespace, whose parent prints the table.
    pub(crate) fn is_child(&self) -> bool {
        self.real_networks || self.real_instances.is_some() || self.real_agents.is_some()
    }
}
