//! `muster db`: looks after the database.

use anyhow::Context as _;
use muster_control::store::copy;
use muster_types::settings::mask_password;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Copy a stopped cluster to an empty database and verify every row
    Copy {
        /// Source, such as sqlite:/var/lib/muster/muster.db
        #[arg(long, value_name = "URL")]
        from: String,
        /// Empty target, such as mysql://user:password@host/name
        #[arg(long, value_name = "URL", env = "MUSTER_DATABASE_URL", hide_env_values = true)]
        to: String,
    },
}

pub(crate) async fn run(command: Command) -> anyhow::Result<()> {
    let Command::Copy { from, to } = command;
    if let Some(path) = from.strip_prefix("sqlite:")
        && !std::path::Path::new(path).exists()
    {
        anyhow::bail!("{path}: no such database");
    }
    let progress = |table: &'static str, rows: u64| {
        if rows.is_multiple_of(50_000) {
            eprintln!("{table}: {rows} rows");
        }
    };
    let copied = copy::run(&from, &to, progress)
        .await
        .with_context(|| format!("copying {} to {}", mask_password(&from), mask_password(&to)))?;
    for table in &copied {
        println!("{:16} {:10} rows  sha256 {}", table.table, table.rows, &table.checksum[..16]);
    }
    println!("verified: {} rows", copied.iter().map(|table| table.rows).sum::<u64>());
    Ok(())
}
