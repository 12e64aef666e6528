//! `muster api`: any request to the API.

use std::fs;
use std::io::{self, Read as _, Write as _};

use anyhow::{Context as _, anyhow};
use clap::Args;
use clap::builder::PossibleValuesParser;
use serde_json::Value;

use super::session::Session;
use crate::error_text::io_error_text;

const METHODS: [&str; 4] = ["GET", "POST", "PUT", "DELETE"];

/// Arguments of `muster api`.
#[derive(Debug, Args)]
#[command(
    after_help = "Prints the body of the response, also of a refused request, whose reason is an error as well."
)]
pub struct Arguments {
    #[arg(value_parser = PossibleValuesParser::new(METHODS), ignore_case = true)]
    method: String,
    /// Path such as /instances, which may have a query
    #[arg(value_parser = parse_path)]
    path: String,
    /// JSON body: the text, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    data: Option<String>,
    /// Parameter of the query; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_parameter)]
    query: Vec<(String, String)>,
}

fn parse_path(text: &str) -> Result<String, String> {
    if text.contains("://") {
        return Err("expected a path such as /instances: the host is given with --api-url".to_owned());
    }
    Ok(format!("/{}", text.trim_start_matches('/')))
}

fn parse_parameter(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// Sends the request and prints the body of the response.
pub(super) async fn run(session: &Session, arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { method, path, data, query } = arguments;
    let body = data.as_deref().map(read_body).transpose()?;
    let method = method.to_ascii_uppercase().parse()?;
    let response = session.client.request_any(method, &path, &query, body).await?;
    match serde_json::from_slice::<Value>(&response.body) {
        Ok(json) => session.print_value(&json)?,
        Err(_) => io::stdout().write_all(&response.body)?,
    }
    response.refusal.map_or(Ok(()), |error| Err(error.into()))
}

/// Returns the JSON of an argument, a file or standard input.
fn read_body(data: &str) -> anyhow::Result<Value> {
    let unreadable = |error: io::Error| anyhow!("cannot read the body: {}", io_error_text(&error));
    let text = match data.strip_prefix('@') {
        Some(file) => fs::read_to_string(file).map_err(unreadable).with_context(|| file.to_owned())?,
        None if data == "-" => {
            let mut text = String::new();
            io::stdin().read_to_string(&mut text).map_err(unreadable)?;
            text
        }
        None => data.to_owned(),
    };
    serde_json::from_str(&text).context("the body is not JSON")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fake_server::FakeServer;
    use crate::output::Format;

    fn arguments(method: &str, path: &str, data: Option<&str>) -> Arguments {
        let query = vec![("all".to_owned(), "a b".to_owned())];
        Arguments { method: method.into(), path: path.into(), data: data.map(str::to_owned), query }
    }

    #[tokio::test]
    async fn sends_method_query_and_body() {
        let (client, fake) = FakeServer::start(vec![("POST /networks", vec![(200, json!({}))])]).await;
        let session = Session { client, format: Format::Table };
        run(&session, arguments("post", "/networks", Some("{\"name\": \"lan\"}"))).await.unwrap();
        assert_eq!(fake.requests(), [r#"POST /networks?all=a+b {"name":"lan"}"#]);
    }

    #[tokio::test]
    async fn refused_request_is_an_error_with_the_reason() {
        let (client, _) =
            FakeServer::start(vec![("DELETE /nodes/a", vec![(409, json!({ "error": "in use" }))])]).await;
        let error = run(&Session { client, format: Format::Table }, arguments("DELETE", "/nodes/a", None))
            .await
            .unwrap_err();
        assert_eq!(error.to_string(), "in use");
    }

    #[test]
    fn body_comes_from_the_argument_or_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("body.json");
        fs::write(&file, "[7]").unwrap();
        assert_eq!(read_body(&format!("@{}", file.display())).unwrap(), json!([7]));
        assert_eq!(read_body("-7").unwrap(), json!(-7));
        assert!(read_body("{").is_err() && read_body("@/nonexistent").is_err());
    }

    #[test]
    fn path_is_not_a_url() {
        assert_eq!(parse_path("instances"), Ok("/instances".to_owned()));
        assert_eq!(parse_path("//evil/x"), Ok("/evil/x".to_owned()));
        assert!(parse_path("http://evil/").is_err());
    }
}
