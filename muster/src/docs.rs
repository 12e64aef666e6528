//! `muster docs`: writes the documentation as a web site.

use std::path::PathBuf;

use anyhow::Context as _;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The directory for the files, which is created. Files in it with the same names are replaced
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let directory = &arguments.output;
    let count = muster_site::write(directory)
        .with_context(|| format!("failed to write the documentation to {}", directory.display()))?;
    muster_client::message!("wrote {count} files: open {}", directory.join("index.html").display());
    Ok(())
}
