//! `muster quota`.

use clap::Subcommand;
use muster_types::quota::{QuotaName, QuotaRecord};

use super::list::{ListOptions, ListView};
use super::session::Session;
use crate::output::Table;

const LIST: ListView<QuotaRecord> = ListView { table, wide: &[], order: &[], watched: &[] };

/// Commands for quotas, which limit how much a namespace may use.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the limits and the usage of a namespace
    Show {
        namespace: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Set limits of a namespace
    Set {
        namespace: String,
        /// Quota and limit, such as networks=10 or memory_mb=65536; 0 means unlimited
        #[arg(value_name = "QUOTA=LIMIT", value_parser = parse_limit, required = true)]
        limits: Vec<(QuotaName, u64)>,
    },
    /// Remove limits of a namespace, so that the defaults of the cluster apply
    Reset {
        namespace: String,
        #[arg(value_name = "QUOTA", required = true)]
        quotas: Vec<QuotaName>,
    },
}

fn parse_limit(text: &str) -> Result<(QuotaName, u64), String> {
    let (name, limit) = text.split_once('=').ok_or("expected QUOTA=LIMIT")?;
    let limit = limit.parse().map_err(|_| format!("{limit:?} is not a whole number of at least 0"))?;
    let name = name.parse().map_err(|_| {
        let names: Vec<&str> = QuotaName::ALL.iter().map(|name| name.as_str()).collect();
        format!("{name:?} is not a quota, must be one of {}", names.join(", "))
    })?;
    Ok((name, limit))
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    let mut options = ListOptions::default();
    let namespace = match command {
        Command::Show { namespace, list } => {
            options = list;
            namespace
        }
        Command::Set { namespace, limits } => {
            for (name, limit) in limits {
                client.set_quota(&namespace, name, limit).await?;
            }
            namespace
        }
        Command::Reset { namespace, quotas } => {
            for name in quotas {
                client.reset_quota(&namespace, name).await?;
            }
            namespace
        }
    };
    let query = options.query();
    session.list(&options, &LIST, || client.quotas(&namespace, &query)).await
}

fn table(quotas: Vec<QuotaRecord>) -> Table {
    Table::new(&["QUOTA", "USED", "LIMIT", "SET FOR"], &[]).rows(quotas.into_iter().map(|quota| {
        let limit = quota.limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
        let set_for = if quota.is_default { "cluster" } else { "namespace" };
        [quota.name.to_string(), quota.used.to_string(), limit, set_for.to_owned()]
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_usage_and_limits() {
        let quota = |name, limit, is_default| QuotaRecord { name, limit, used: 3, is_default };
        let quotas = vec![quota(QuotaName::Keys, Some(5), false), quota(QuotaName::Cpus, None, true)];
        let text = table(quotas).render(None);
        assert_eq!(
            text,
            "QUOTA  USED  LIMIT      SET FOR\nkeys   3     5          namespace\ncpus   3     unlimited  cluster\n"
        );
    }

    #[test]
    fn names_the_quotas_if_one_is_unknown() {
        assert_eq!(parse_limit("keys=7"), Ok((QuotaName::Keys, 7)));
        assert!(parse_limit("key=7").unwrap_err().contains("floating_addresses"));
        assert!(parse_limit("keys=-1").is_err());
        assert!(parse_limit("keys").is_err());
    }
}
