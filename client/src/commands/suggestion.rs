//! "Did you mean": names similar to one that does not exist.

use percent_encoding::percent_decode_str;

use crate::api::{Client, Error};
use crate::output::{escape_control, names};
use crate::similar_name::closest;

/// The objects that are given by name: the start of their paths, and the path of the list.
const NAMED: [&str; 6] =
    ["/instances/", "/networks/", "/artifacts/", "/nodes/", "/auth/issuers/", "/auth/namespaces/"];

/// Returns the name that the user probably meant, if an object was not found by its name.
pub(super) async fn similar_name(client: &Client, error: &anyhow::Error) -> Option<String> {
    let error = error.chain().find_map(|cause| cause.downcast_ref::<Error>())?;
    let path = error.not_found_path()?;
    let (list, name) = list_and_name(path)?;
    let existing = client.names(list).await.ok()?;
    closest(&name, &names(&existing)).map(|name| escape_control(&name))
}

/// Returns the path of the list that an object would be in, and the name that it was requested by.
fn list_and_name(path: &str) -> Option<(&str, String)> {
    let path = path.split('?').next()?;
    let start = NAMED.iter().find(|start| path.starts_with(**start))?;
    let mut segments = path[start.len()..].split('/');
    let name = segments.next()?;
    let nested = segments.next().zip(segments.next());
    // The keys, rules and webhooks of a namespace have names, too.
    let (list, name) = match nested {
        Some((collection @ ("keys" | "rules" | "webhooks"), nested)) if *start == "/auth/namespaces/" => {
            (&path[..start.len() + name.len() + 1 + collection.len()], nested)
        }
        _ => (start.trim_end_matches('/'), name),
    };
    Some((list, percent_decode_str(name).decode_utf8().ok()?.into_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fake_server::FakeServer;

    #[test]
    fn finds_the_list_of_an_object() {
        let cases = [
            ("/instances/wbe", Some(("/instances", "wbe"))),
            ("/instances/w%20b/events?limit=3", Some(("/instances", "w b"))),
            ("/auth/namespaces/ic", Some(("/auth/namespaces", "ic"))),
            ("/auth/namespaces/ci/keys/depoly", Some(("/auth/namespaces/ci/keys", "depoly"))),
            ("/auth/namespaces/ci/claims/x", Some(("/auth/namespaces", "ci"))),
            ("/blobs/5d5e", None),
        ];
        for (path, expected) in cases {
            let found = list_and_name(path);
            let found = found.as_ref().map(|(list, name)| (*list, name.as_str()));
            assert_eq!(found, expected, "{path}");
        }
    }

    #[tokio::test]
    async fn suggestion_comes_from_the_cluster() {
        let (client, _) =
            FakeServer::start(vec![("GET /nodes", vec![(200, json!([{ "name": "sim-1" }]))])]).await;
        let error = client.node("smi-1").await.unwrap_err().into();
        assert_eq!(similar_name(&client, &error).await.as_deref(), Some("sim-1"));
    }
}
