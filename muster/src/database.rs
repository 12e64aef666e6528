//! `muster db`: maintains the database.

use std::path::PathBuf;

use anyhow::Context as _;
use muster_control::auth::secrets::Secrets;
use muster_control::objects;
use muster_store::copy;
use muster_types::key::Secret;
use muster_types::settings::mask_password;

use crate::state::DataDir;
use crate::stdout::print;
use crate::{config, serve};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Copy the database of a stopped cluster to an empty one and verify every row
    Copy {
        /// Source database, such as sqlite:/var/lib/muster/muster.db
        #[arg(long, value_name = "URL")]
        from: String,
        /// Empty target database, such as mysql://user:password@host/name
        #[arg(long, value_name = "URL", env = "MUSTER_DATABASE_URL", hide_env_values = true)]
        to: String,
    },
    /// Replace the secret of key deploy of namespace system, for use when all keys are lost
    RecoverKey(RecoverKey),
}

#[derive(Debug, clap::Args)]
pub(crate) struct RecoverKey {
    /// Data directory of the stopped daemon
    #[arg(long, value_name = "DIR", default_value_os_t = muster_client::default_data_dir())]
    data_dir: PathBuf,
    /// Settings file with one NAME = value per line
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

pub(crate) async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Copy { from, to } => copy_cluster(from, to).await,
        Command::RecoverKey(arguments) => recover_key(arguments).await,
    }
}

async fn recover_key(arguments: RecoverKey) -> anyhow::Result<()> {
    let settings = config::load(arguments.config.as_deref())?;
    let data = DataDir::open(&arguments.data_dir).await?;
    let (store, seed) = serve::open_store(&settings, &data).await?;
    let apiurl = format!("http://127.0.0.1:{}", settings.api_port);
    let save = |key: &Secret| data.write_credentials(key, &apiurl).map_err(|error| format!("{error:#}"));
    objects::key::recover(&store, &Secrets::new(&seed), save).await?;
    store.close().await;
    muster_client::message!(
        "the new secret of key deploy of namespace system is in {}",
        data.credentials().display()
    );
    Ok(())
}

async fn copy_cluster(from: String, to: String) -> anyhow::Result<()> {
    if let Some(path) = from.strip_prefix("sqlite:")
        && !std::path::Path::new(path).exists()
    {
        anyhow::bail!("{path}: no such database");
    }
    let progress = |table: &'static str, rows: u64| {
        if rows.is_multiple_of(50_000) {
            muster_client::message!("{table}: {rows} rows");
        }
    };
    let copied = copy::run(&from, &to, progress)
        .await
        .with_context(|| format!("failed to copy {} to {}", mask_password(&from), mask_password(&to)))?;
    for table in &copied {
        let line = format!("{:16} {:10} rows  sha256 {}\n", table.table, table.rows, &table.checksum[..16]);
        print(line.as_bytes())?;
    }
    let rows = copied.iter().map(|table| table.rows).sum::<u64>();
    print(format!("verified: {rows} rows\n").as_bytes())
}
