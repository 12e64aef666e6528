//! `muster whoami`: the credentials that commands use.

use muster_types::session::SessionRecord;

use super::session::Session;
use crate::output::{Table, or_dash};
use crate::time::format_utc;

/// Shows the cluster, the namespace and the key that commands use.
pub(super) async fn run(session: &Session) -> anyhow::Result<()> {
    let url = session.client.url().to_owned();
    session.show(session.client.session().await?, |record| details(url, record))
}

fn details(url: String, record: SessionRecord) -> Table {
    let scopes = record.scopes.map_or_else(|| "all".to_owned(), |scopes| or_dash(scopes.join(", ")));
    let details = [
        ("url", url),
        ("namespace", record.namespace),
        ("key", record.key_name),
        ("scopes", scopes),
        ("token expires", format_utc(record.expires)),
    ];
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_cluster_namespace_key_and_scopes() {
        let scopes = Some(vec!["instance.*".to_owned(), "node.read".to_owned()]);
        let record = SessionRecord {
            namespace: "ci".into(),
            key_name: "deploy".into(),
            scopes,
            expires: 1_767_225_600.0,
        };
        let text = details("http://host".into(), record).render(None);
        assert!(
            text.starts_with("url            http://host\nnamespace      ci\nkey            deploy\n"),
            "{text}"
        );
        assert!(text.contains("instance.*, node.read\n"), "{text}");
    }
}
