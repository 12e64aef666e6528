//! Benchmarks a real `muster serve` on this host and prints one table.
//!
//! The cost of a request is the server's CPU time, not the latency: the load generator shares the cores with the server.
//! `GET /livez` does nothing but HTTP and is the baseline of other requests. A round interleaves its measurements in
//! slices, so that noise affects all of them alike; the table has the median of the rounds.
//!
//! The cost of a request includes writing its events to the database later. A second server that only spools its events
//! shows the cost of the request alone.

mod agents;
mod allocation;
mod arguments;
mod bare;
mod engine;
mod exchanges;
mod images;
mod instances;
mod instances_real;
mod load;
mod logins;
mod mariadb;
mod namespace;
mod networks;
mod pages;
mod port;
mod requests;
mod sampling;
mod scale;
mod server;
mod table;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use arguments::Arguments;
use clap::Parser as _;
use engine::{Engine, Scale};
use mariadb::MariaDb;
use sampling::progress;
use table::{Row, Table};
use tokio::signal::unix::{SignalKind, signal};

const CALLS: usize = 20_000;
const NAMESPACES: usize = 10_000;
/// How long events are recorded, in seconds.
const RECORDING_SECONDS: usize = 10;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(table) if arguments.is_child() => {
            println!("{}", table.to_json());
            ExitCode::SUCCESS
        }
        Ok(table) => {
            println!("{table}");
            match table.missed_targets() {
                0 => ExitCode::SUCCESS,
                missed => {
                    eprintln!("{missed} targets missed");
                    ExitCode::FAILURE
                }
            }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(arguments: &Arguments) -> anyhow::Result<Table> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        table = measure_all(arguments) => table,
        // Child processes are killed on drop.
        _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("terminated"),
    }
}

async fn measure_all(arguments: &Arguments) -> anyhow::Result<Table> {
    let program = match &arguments.server {
        Some(program) => program.clone(),
        None => std::env::current_exe()?.with_file_name("muster"),
    };
    let mut table = Table::default();
    if !measure_selected(arguments, &program, &mut table).await? {
        measure_everything(arguments, &program, &mut table).await?;
    }
    Ok(table)
}

/// Runs the benchmarks that the arguments select. Returns false if they select none.
async fn measure_selected(arguments: &Arguments, program: &Path, table: &mut Table) -> anyhow::Result<bool> {
    let quick = arguments.quick;
    if arguments.real_networks {
        networks::measure_real(program, if quick { 10 } else { 1 }, table).await?;
    } else if let Some(directory) = &arguments.real_instances {
        instances_real::measure(program, directory, &arguments.image, quick, table).await?;
    } else if let Some(directory) = &arguments.real_agents {
        agents::measure(program, directory, &arguments.image, quick, table).await?;
    } else if arguments.agent {
        agents::measure_in_namespace(arguments, program, table).await.context("agents")?;
    } else if arguments.scale {
        scale::measure(program, quick, arguments.plot.as_deref(), table).await.context("scale")?;
    } else if arguments.logins {
        logins::measure(program, table).await.context("logins")?;
    } else if arguments.exchanges {
        exchanges::measure(program, quick, table).await.context("exchanges")?;
    } else if arguments.instances {
        instances::measure(program, quick, table).await.context("simulated instances")?;
        instances_real::measure_in_namespace(arguments, program, table).await.context("real instances")?;
    } else if arguments.pages {
        pages::measure(program, quick, table).await.context("pages")?;
    } else if arguments.images {
        images::measure(program, quick, table).await.context("images")?;
    } else {
        return Ok(false);
    }
    Ok(true)
}

async fn measure_everything(arguments: &Arguments, program: &Path, table: &mut Table) -> anyhow::Result<()> {
    let quick = arguments.quick;
    let divisor = if quick { 10 } else { 1 };
    let scale = Scale {
        calls: CALLS / divisor,
        namespaces: NAMESPACES / divisor,
        seconds: RECORDING_SECONDS / divisor,
    };
    let directory = tempfile::tempdir()?;
    let sqlite = Engine { name: "SQLite", settings: vec![], spooling: vec![], has_targets: true };
    requests::measure(program, directory.path(), &sqlite, scale, table).await.context("with SQLite")?;
    drop(directory);
    logins::measure(program, table).await.context("logins")?;
    exchanges::measure(program, quick, table).await.context("exchanges")?;
    images::measure(program, quick, table).await.context("images")?;
    allocation::measure(quick, table).await.context("address allocation")?;
    networks::measure_in_namespace(arguments, program, table).await.context("real networks")?;
    pages::measure(program, quick, table).await.context("pages")?;
    instances::measure(program, quick, table).await.context("simulated instances")?;
    instances_real::measure_in_namespace(arguments, program, table).await.context("real instances")?;
    agents::measure_in_namespace(arguments, program, table).await.context("agents")?;
    if arguments.sqlite {
        return Ok(());
    }

    let directory = tempfile::tempdir()?;
    progress("starting MariaDB");
    let Some(mariadb) = MariaDb::start(directory.path()).await? else {
        table.section("MariaDB");
        table.add(Row::new("not measured", "mariadbd is not installed"));
        return Ok(());
    };
    let [settings, spooling] = mariadb.urls.clone().map(|url| vec![("MUSTER_DATABASE_URL".to_owned(), url)]);
    let engine = Engine { name: "MariaDB", settings, spooling, has_targets: false };
    let result = requests::measure(program, directory.path(), &engine, scale, table).await;
    mariadb.stop().await?;
    result.context("with MariaDB")
}
