//! `muster cluster rebalance`: moves instances from full nodes to empty ones.

use anyhow::bail;
use clap::Args;
use muster_types::rebalance::RebalanceRecord;

use super::arguments::prompt_confirmation;
use super::operation;
use super::session::Session;
use super::wait::LongWaitOptions;
use crate::output::{self, Table};
use crate::transfer::unless_interrupted;

/// How to follow a rebalancing.
const CONTINUES: &str =
    "the rebalancing continues: see `muster operation list --target-type namespace --target system`";

/// Arguments of `muster cluster rebalance`.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Only show the plan
    #[arg(long)]
    dry_run: bool,
    /// Maximum number of instances that move (default: 10)
    #[arg(long, value_name = "NUMBER")]
    max_moves: Option<u64>,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    wait: LongWaitOptions,
}

/// Shows the plan, asks, moves the instances, and waits until they have moved.
pub(super) async fn rebalance(session: &Session, arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { dry_run, max_moves, yes, wait } = arguments;
    let client = &session.client;
    let response = client.rebalance(true, max_moves).await?;
    let plan = response.clone().value()?;
    if dry_run || plan.moves.is_empty() {
        return if session.is_structured() { session.print_value(response.json()) } else { show(&plan) };
    }
    if !session.is_structured() {
        show(&plan)?;
    }
    if !yes && !prompt_confirmation(&format!("migrate these {} instances?", plan.moves.len()))? {
        bail!("nothing was moved");
    }
    let response = client.rebalance(false, max_moves).await?;
    let started = response.clone().value()?;
    if session.is_structured() {
        session.print_value(response.json())?;
    } else if started.moves != plan.moves {
        crate::message!("the cluster has changed, so the plan is another one:");
        show(&started)?;
    }
    let (Some(handle), Some(timer)) = (started.operation, wait.timer()) else { return Ok(()) };
    let ended = operation::wait_until_complete(client, &handle, timer, CONTINUES);
    if let Some(error) = unless_interrupted(ended, || CONTINUES.to_owned()).await? {
        bail!("not all instances were moved: {error}");
    }
    if !session.is_structured() {
        output::status("the rebalancing is complete");
    }
    Ok(())
}

/// Prints a plan: its moves as a table, and what they achieve.
fn show(plan: &RebalanceRecord) -> anyhow::Result<()> {
    if !plan.moves.is_empty() {
        output::print_table(&moves(plan))?;
    }
    output::status(&summary(plan));
    Ok(())
}

fn moves(plan: &RebalanceRecord) -> Table {
    Table::new(&["INSTANCE", "NAMESPACE", "FROM", "TO"], &["REASON"]).rows(
        plan.moves
            .iter()
            .cloned()
            .map(|planned| [planned.name, planned.namespace, planned.source, planned.target, planned.reason]),
    )
}

fn summary(plan: &RebalanceRecord) -> String {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    match &plan.reason {
        Some(reason) => format!("nothing to do: {reason}"),
        None => {
            let (before, after) = (percent(plan.spread), percent(plan.spread_after));
            format!(
                "the shares of the fullest and the emptiest node differ by {before}, afterwards by {after}"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn shows_the_moves_and_what_they_achieve() {
        let plan: RebalanceRecord = from_value(json!({
            "spread": 0.67, "spread_after": 0.1, "reason": null, "operation": null,
            "nodes": [{ "name": "a", "share": 0.67, "share_after": 0.3 }, { "name": "b", "share": 0.0, "share_after": 0.2 }],
            "moves": [{
                "instance_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "name": "web", "namespace": "ci",
                "source": "a", "target": "b", "reason": "67 % of a are committed, and 0 % of b",
            }],
        }))
        .unwrap();
        assert_eq!(
            moves(&plan).render(None),
            "INSTANCE  NAMESPACE  FROM  TO  REASON\n\
             web       ci         a     b   67 % of a are committed, and 0 % of b\n"
        );
        let text = "the shares of the fullest and the emptiest node differ by 67 %, afterwards by 10 %";
        assert_eq!(summary(&plan), text);
        let idle = RebalanceRecord { reason: Some("balanced".into()), ..plan };
        assert_eq!(summary(&idle), "nothing to do: balanced");
    }
}
