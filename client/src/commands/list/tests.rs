use serde::Deserialize;

use super::*;
use crate::fake_server::FakeServer;

#[derive(Deserialize)]
struct Record {
    name: String,
    state: String,
}

const VIEW: ListView<Record> = ListView {
    table: |records| {
        let rows = records.into_iter().map(|record| [record.name, record.state]);
        Table::new(&["NAME", "LAST STATE"], &[]).rows(rows)
    },
    wide: &["cpus", "node"],
    order: &["name"],
    watched: &[ObjectType::Instance],
};

fn records() -> Vec<Value> {
    vec![
        json!({ "uuid": "2", "name": "web", "state": "created", "cpus": 2, "node": null, "disk": { "size": 8 } }),
        json!({ "uuid": "1", "name": "db", "state": "error", "cpus": 1, "node": "a", "disk": { "size": 9 } }),
    ]
}

fn render(options: &ListOptions, format: Format) -> anyhow::Result<String> {
    let records = sorted(&records().into(), options, &VIEW);
    Ok(table(&records, options, &VIEW, format)?.render(None))
}

fn columns(columns: &[&str]) -> ListOptions {
    ListOptions { columns: columns.iter().map(|name| (*name).to_owned()).collect(), ..ListOptions::default() }
}

#[test]
fn wide_tables_have_more_columns() {
    let all = ListOptions::default();
    assert_eq!(render(&all, Format::Table).unwrap(), "NAME  LAST STATE\ndb    error\nweb   created\n");
    let wide = "NAME  LAST STATE  CPUS  NODE\ndb    error       1     a\nweb   created     2     -\n";
    assert_eq!(render(&all, Format::Wide).unwrap(), wide);
}

#[test]
fn columns_are_those_of_the_table_or_fields() {
    let text = render(&columns(&["disk.size", "last_state", "name"]), Format::Table).unwrap();
    assert_eq!(text, "DISK.SIZE  LAST STATE  NAME\n9          error       db\n8          created     web\n");
    let error = render(&columns(&["colour"]), Format::Table).unwrap_err().to_string();
    assert!(
        error.contains("\"colour\"") && error.contains("last_state") && error.contains("cpus"),
        "{error}"
    );
}

#[test]
fn keeps_the_order_of_the_server_with_sort() {
    let options = ListOptions { sort: Some("-cpus".into()), ..columns(&["name"]) };
    assert_eq!(render(&options, Format::Table).unwrap(), "NAME\nweb\ndb\n");
}

#[test]
fn sorts_addresses_as_numbers_and_missing_values_last() {
    let mut values = [json!(null), json!("10.0.0.10"), json!("10.0.0.9")];
    values.sort_by(compare);
    assert_eq!(values, [json!("10.0.0.9"), json!("10.0.0.10"), json!(null)]);
}

#[tokio::test]
async fn reports_only_changed_records() {
    let (client, _) = FakeServer::start(vec![]).await;
    let session = Session { client, format: Format::Json };
    let options = ListOptions::default();
    let before = session.render(&records(), &options, &VIEW).unwrap().1;
    let mut changed = records();
    changed[0]["state"] = json!("error");
    changed[1] = json!({ "uuid": "3", "name": "new" });
    let after = session.render(&changed, &options, &VIEW).unwrap().1;
    let lines = session.changes(&before.into_iter().collect(), &after);
    let changes: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: Vec<_> = changes.iter().map(|line| (&line["change"], &line["record"]["uuid"])).collect();
    assert_eq!(
        seen,
        [(&json!("changed"), &json!("2")), (&json!("added"), &json!("3")), (&json!("deleted"), &json!("1"))]
    );
}

#[tokio::test]
async fn requests_pages_until_the_limit() {
    let page = |from: usize, to: usize| -> Value {
        (from..to).map(|at| json!({ "name": at.to_string() })).collect()
    };
    let (client, fake) =
        FakeServer::start(vec![("GET /nodes", vec![(200, page(0, 1000)), (200, page(1000, 1500))])]).await;
    fake.page("abc");
    let query =
        ListQuery { limit: Some(1500), sort: Some("-name".into()), filter: vec!["state:created".into()] };
    let nodes = client.nodes(&query).await.unwrap();
    assert_eq!(nodes.json().as_array().unwrap().len(), 1500);
    assert_eq!(
        fake.requests(),
        [
            "GET /nodes?limit=1000&sort=-name&filter=state%3Acreated",
            "GET /nodes?limit=500&sort=-name&filter=state%3Acreated&cursor=abc"
        ]
    );
}
