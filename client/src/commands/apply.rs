//! `muster apply`: makes the cluster contain the objects that files describe. See docs/decisions/0095.

mod compare;
mod execute;
mod manifest;
mod observed;
mod ownership;
mod plan;
mod requests;
mod schema;
mod yaml;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use muster_types::object::check_name;

use self::manifest::STDIN;
use self::observed::Cluster;
use self::ownership::ObjectSet;
use self::plan::Planner;
use super::arguments::{path_parser, prompt_confirmation};
use super::session::Session;
use super::wait::LongWaitOptions;
use crate::exit_code::{Outcome, error_with_outcome};
use crate::output::{self, escape_control};

/// The set of objects from standard input without `--set`.
const STDIN_SET: &str = "stdin";

/// Arguments of `muster apply`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --yes, the plan is shown and must be confirmed. docs/apply.md describes the files. Exit code 8: --dry-run found differences.")]
pub struct Arguments {
    /// File with YAML documents, or a directory with such files; - is standard input; may be repeated
    #[arg(short = 'f', long = "file", value_name = "FILE", value_parser = path_parser(), required = true)]
    file: Vec<PathBuf>,
    /// Name of the set that the objects belong to; by default the name of the first file without its ending
    #[arg(long, value_name = "NAME")]
    set: Option<String>,
    /// Only show the plan
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Do not ask before changing something
    #[arg(short = 'y', long)]
    yes: bool,
    /// Delete objects that were created for this set and are missing in the files
    #[arg(long)]
    prune: bool,
    /// Delete objects that cannot be changed in place, and create them again
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    wait: LongWaitOptions,
}

impl Arguments {
    /// Returns the set that the objects belong to.
    fn set(&self, owner: &str) -> anyhow::Result<ObjectSet> {
        let usage = |text: &str| Err(error_with_outcome(Outcome::Usage, text.to_owned()));
        let first = self.file.first().map_or(Path::new(STDIN), PathBuf::as_path);
        let name = match &self.set {
            Some(name) => name.clone(),
            None if first == Path::new(STDIN) && self.prune => {
                return usage("--prune of standard input needs the name of the set: give --set NAME");
            }
            None if first == Path::new(STDIN) => STDIN_SET.to_owned(),
            None => {
                // `.` and `..` have no name of their own.
                let path = first.canonicalize().unwrap_or_else(|_| first.to_owned());
                match path.file_stem().and_then(|stem| stem.to_str()) {
                    Some(stem) => stem.to_owned(),
                    None => {
                        return usage(
                            "the file has no name that could be the name of the set: give --set NAME",
                        );
                    }
                }
            }
        };
        check_name("--set", &name).map_err(|error| error_with_outcome(Outcome::Usage, error.to_string()))?;
        Ok(ObjectSet { owner: owner.to_owned(), name })
    }
}

/// Shows the plan, asks, and executes it.
pub(super) async fn run(arguments: Arguments, session: &Session) -> anyhow::Result<ExitCode> {
    let client = &session.client;
    let set = arguments.set(client.own_namespace())?;
    let declared = manifest::read(&arguments.file, client.own_namespace())?;
    let cluster = Cluster::read(client, &declared, arguments.prune).await?;
    let planner =
        Planner { client, cluster: &cluster, set: &set, replace: arguments.replace, prune: arguments.prune };
    let plan = planner.plan(declared).await?;
    if session.is_structured() {
        session.print_value(&plan.json(&set))?;
    } else {
        output::print_table(&plan.table())?;
    }
    output::status(&format!(
        "set {} of namespace {}: {}",
        escape_control(&set.name),
        set.owner,
        plan.summary()
    ));
    if plan.kept > 0 {
        output::status(&format!(
            "{} objects of the set are missing in the files: --prune deletes them",
            plan.kept
        ));
    }
    if !plan.problems.is_empty() {
        let text = format!("nothing was changed:\n  {}", plan.problems.join("\n  "));
        return Err(error_with_outcome(Outcome::Conflict, text));
    }
    if arguments.dry_run {
        return Ok(if plan.has_changes() { Outcome::Different.into() } else { ExitCode::SUCCESS });
    }
    if plan.has_changes() && !arguments.yes && !prompt_confirmation("apply this plan?")? {
        bail!("nothing was changed");
    }
    execute::execute(session, &set, &plan, arguments.wait.timer()).await?;
    Ok(ExitCode::SUCCESS)
}
