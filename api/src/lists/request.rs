//! Which part of a list a request asks for, and how it is selected.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use muster_types::ids::{ArtifactId, BlobId, InstanceId, InterfaceId, NetworkId};
use muster_types::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::fields::{FieldKind, ListFields, ListParameter};
use super::sorting::{Position, Sort, SortValue};
use crate::arguments::form_pairs;
use crate::request_events::shortened;
use crate::response::streamed_json;
use muster_store::events::EventPosition;

/// The maximum number of records in a page.
const MAX_LIMIT: i64 = 1000;
const MAX_FILTERS: usize = 16;
const MAX_CURSOR_BYTES: usize = 2048;
/// The number of records after which a page ends even if it is not full, so that a filter that matches little does not make
/// the daemon read everything.
const MAX_SCANNED: usize = 20_000;
/// The maximum length of a value in an error, in bytes.
const MAX_SHOWN_VALUE: usize = 64;
const NEXT_CURSOR: HeaderName = HeaderName::from_static("x-next-cursor");

/// The part of a list that a request asks for.
#[derive(Debug, Clone)]
pub(crate) struct ListRequest {
    fields: Arc<ListFields>,
    limit: usize,
    /// `None` for the order in which the list is read.
    sort: Option<Sort>,
    filters: Vec<Filter>,
    cursor: Option<Cursor>,
    /// The query without the cursor.
    query: String,
}

/// Where a page has ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Cursor {
    /// The fields of the last record that the order of the list depends on.
    #[serde(rename = "k")]
    Key(BTreeMap<String, SortValue>),
    /// The order, and the position of the last record in it.
    #[serde(rename = "s")]
    Sorted(String, Position),
}

impl Cursor {
    fn encode(&self) -> Result<String> {
        let bytes = serde_json::to_vec(self).map_err(|error| Error::Internal(error.to_string()))?;
        Ok(BASE64.encode(bytes))
    }

    fn parse(text: &str) -> Result<Self> {
        let bytes = Some(text).filter(|text| text.len() <= MAX_CURSOR_BYTES);
        let cursor = bytes.and_then(|text| BASE64.decode(text).ok());
        cursor.and_then(|bytes| serde_json::from_slice(&bytes).ok()).ok_or_else(|| {
            invalid(ListParameter::Cursor, "must be the value of X-Next-Cursor; omit it to start again")
        })
    }
}

#[derive(Debug, Clone)]
struct Filter {
    field: String,
    value: FilterValue,
}

#[derive(Debug, Clone)]
enum FilterValue {
    Null,
    Text(String),
    Prefix(String),
    Number(f64),
    Boolean(bool),
}

fn invalid(parameter: ListParameter, text: &str) -> Error {
    Error::Invalid(format!("{}: {text}", parameter.name()))
}

fn shown(text: &str) -> String {
    shortened(text.replace(char::is_control, ""), MAX_SHOWN_VALUE)
}

impl Filter {
    fn parse(fields: &ListFields, text: &str) -> Result<Self> {
        let refuse = |text: String| invalid(ListParameter::Filter, &text);
        let Some((field, value)) = text.split_once(':') else {
            return Err(refuse(format!("must be FIELD:VALUE, not {:?}", shown(text))));
        };
        let Some(kind) = fields.kind(field) else {
            return Err(refuse(format!("unknown field {:?}, use one of: {}", shown(field), fields.names())));
        };
        let expected = |what: &str| refuse(format!("{field}: must be {what}, not {:?}", shown(value)));
        let value = match kind {
            _ if value == "null" => FilterValue::Null,
            FieldKind::Text => match value.strip_suffix('*') {
                Some(prefix) => FilterValue::Prefix(prefix.to_owned()),
                None => FilterValue::Text(value.to_owned()),
            },
            FieldKind::Number => {
                let number = value.parse().ok().filter(|number: &f64| number.is_finite());
                FilterValue::Number(number.ok_or_else(|| expected("a number or null"))?)
            }
            FieldKind::Boolean => {
                FilterValue::Boolean(value.parse().map_err(|_| expected("true, false or null"))?)
            }
        };
        Ok(Self { field: field.to_owned(), value })
    }

    fn matches(&self, record: &Value) -> bool {
        match (&self.value, field_of(record, &self.field)) {
            (FilterValue::Null, value) => value.is_none_or(Value::is_null),
            (FilterValue::Text(text), Some(Value::String(value))) => value == text,
            (FilterValue::Prefix(prefix), Some(Value::String(value))) => value.starts_with(prefix.as_str()),
            (FilterValue::Number(number), Some(Value::Number(value))) => value.as_f64() == Some(*number),
            (FilterValue::Boolean(flag), Some(Value::Bool(value))) => value == flag,
            _ => false,
        }
    }
}

/// Returns a field of a record. An item that is not a record is its only field.
fn field_of<'a>(record: &'a Value, field: &str) -> Option<&'a Value> {
    match record {
        Value::Object(members) => members.get(field),
        item => Some(item),
    }
}

/// The place of a record in a list that is read in pages.
pub(crate) trait PageKey: Send + Sized + 'static {
    /// The order in which such lists are read, as `sort` names it. Empty if the records do not contain the key.
    const ORDER: &'static str;
    /// The fields that the order depends on.
    const FIELDS: &'static [&'static str];

    /// Returns the key that consists of the values of [`FIELDS`](Self::FIELDS).
    fn from_fields(values: &[&SortValue]) -> Option<Self>;
}

fn parsed<T: DeserializeOwned>(values: &[&SortValue]) -> Option<T> {
    match values {
        [SortValue::Text(text)] => serde_json::from_value(Value::String(text.clone())).ok(),
        _ => None,
    }
}

macro_rules! page_keys {
    ($($key:ty: $field:literal),* $(,)?) => {$(
        impl PageKey for $key {
            const ORDER: &'static str = $field;
            const FIELDS: &'static [&'static str] = &[$field];

            fn from_fields(values: &[&SortValue]) -> Option<Self> {
                parsed(values)
            }
        }
    )*};
}
page_keys! {
    ArtifactId: "uuid", BlobId: "uuid", InstanceId: "uuid", InterfaceId: "uuid", NetworkId: "uuid",
    Ipv4Addr: "address", String: "name",
}

/// The number of an agent operation, which is not part of its record.
impl PageKey for i64 {
    const ORDER: &'static str = "";
    const FIELDS: &'static [&'static str] = &[];

    fn from_fields(_: &[&SortValue]) -> Option<Self> {
        None
    }
}

impl PageKey for EventPosition {
    const ORDER: &'static str = "-timestamp";
    const FIELDS: &'static [&'static str] = &["timestamp", "event_uuid"];

    fn from_fields(values: &[&SortValue]) -> Option<Self> {
        match values {
            [SortValue::Number(timestamp), SortValue::Text(event)] => {
                Some(Self { timestamp: *timestamp, event_uuid: event.clone() })
            }
            _ => None,
        }
    }
}

/// The selected records, serialized.
pub(crate) struct SelectedRecords {
    records: Vec<Vec<u8>>,
    /// Where the next page begins, if there may be one.
    next: Option<Cursor>,
}

impl ListRequest {
    /// Parses the query of a request for a list. Returns the rest of the query, too, or `None` if the request is for the whole
    /// list.
    pub(crate) fn parse(fields: &Arc<ListFields>, query: &str) -> Result<Option<(Self, String)>> {
        let mut given: BTreeMap<&'static str, String> = BTreeMap::new();
        let mut filters = Vec::new();
        let mut rest = form_urlencoded::Serializer::new(String::new());
        let mut link = form_urlencoded::Serializer::new(String::new());
        for (name, value) in form_pairs(query) {
            let parameter = ListParameter::named(&name);
            if parameter != Some(ListParameter::Cursor) {
                link.append_pair(&name, &value);
            }
            match parameter {
                None => {
                    rest.append_pair(&name, &value);
                }
                Some(ListParameter::Filter) => filters.push(Filter::parse(fields, &value)?),
                Some(parameter) => {
                    // The handler of a history reads its limit itself.
                    if fields.is_history && parameter == ListParameter::Limit {
                        rest.append_pair(&name, &value);
                    }
                    if given.insert(parameter.name(), value).is_some() && !fields.is_history {
                        return Err(invalid(parameter, "given more than once"));
                    }
                }
            }
        }
        if given.is_empty() && filters.is_empty() {
            return Ok(None);
        }
        if filters.len() > MAX_FILTERS {
            return Err(invalid(ListParameter::Filter, &format!("given more than {MAX_FILTERS} times")));
        }
        let get = |parameter: ListParameter| given.get(parameter.name()).map(String::as_str);
        let request = Self {
            limit: limit(fields, get(ListParameter::Limit))?,
            sort: get(ListParameter::Sort).map(|text| sort(fields, text)).transpose()?,
            cursor: get(ListParameter::Cursor).map(Cursor::parse).transpose()?,
            fields: Arc::clone(fields),
            filters,
            query: link.finish(),
        };
        Ok(Some((request, rest.finish())))
    }

    /// Returns the request with the limit that the handler of a history has read, which may be in the body.
    pub(crate) fn with_limit(&self, limit: i64) -> Self {
        Self { limit: usize::try_from(limit).unwrap_or_default(), ..self.clone() }
    }

    /// Returns how many records a page should be read of.
    pub(crate) fn read_size(&self) -> i64 {
        if self.filters.is_empty() { i64::try_from(self.limit).unwrap_or(MAX_LIMIT) + 1 } else { MAX_LIMIT }
    }

    /// Selects records from a list that is read in pages.
    pub(crate) async fn select<T, K, F, P>(&self, read: F) -> Result<SelectedRecords>
    where
        T: Serialize,
        K: PageKey,
        F: Fn(Option<K>) -> P,
        P: Future<Output = Result<(Vec<T>, Option<K>)>>,
    {
        let is_own_order = match &self.sort {
            None => !K::ORDER.is_empty(),
            Some(sort) => sort.to_string() == K::ORDER,
        };
        if is_own_order {
            return self.select_in_order(read).await;
        }
        let mut sorting = Sorting::new(self)?;
        let mut after = None;
        loop {
            let (records, next) = read(after.take()).await?;
            for record in &records {
                sorting.add(record)?;
            }
            match next {
                Some(key) => after = Some(key),
                None => return sorting.finish(),
            }
        }
    }

    /// Selects records from a list in the order in which it is read.
    async fn select_in_order<T, K, F, P>(&self, read: F) -> Result<SelectedRecords>
    where
        T: Serialize,
        K: PageKey,
        F: Fn(Option<K>) -> P,
        P: Future<Output = Result<(Vec<T>, Option<K>)>>,
    {
        let mut after = match &self.cursor {
            None => None,
            Some(Cursor::Key(fields)) => {
                let values: Vec<&SortValue> = K::FIELDS.iter().filter_map(|name| fields.get(*name)).collect();
                Some(K::from_fields(&values).ok_or_else(wrong_cursor)?)
            }
            Some(Cursor::Sorted(..)) => return Err(wrong_cursor()),
        };
        let (mut selected, mut last, mut scanned) = (Vec::new(), None, 0);
        loop {
            let (records, next) = read(after.take()).await?;
            for (index, record) in records.iter().enumerate() {
                let value = to_value(record)?;
                if self.matches(&value) {
                    if selected.len() == self.limit {
                        return Ok(SelectedRecords { records: selected, next: last });
                    }
                    selected.push(to_bytes(record)?);
                }
                let fields = K::FIELDS.iter();
                let fields =
                    fields.map(|name| ((*name).to_owned(), SortValue::of_key(field_of(&value, name))));
                last = Some(Cursor::Key(fields.collect()));
                scanned += 1;
                if scanned >= MAX_SCANNED && (index + 1 < records.len() || next.is_some()) {
                    return Ok(SelectedRecords { records: selected, next: last });
                }
            }
            match next {
                Some(key) => after = Some(key),
                None => return Ok(SelectedRecords { records: selected, next: None }),
            }
        }
    }

    /// Selects records from a complete list.
    pub(crate) fn select_from<T: Serialize>(&self, records: &[T]) -> Result<SelectedRecords> {
        let mut sorting = Sorting::new(self)?;
        for record in records {
            sorting.add(record)?;
        }
        sorting.finish()
    }

    fn matches(&self, record: &Value) -> bool {
        self.filters.iter().all(|filter| filter.matches(record))
    }

    /// Returns the response with the selected records.
    pub(crate) fn respond(&self, selected: &SelectedRecords) -> Result<Response> {
        let mut body = vec![b'['];
        body.extend(selected.records.join(&b','));
        body.extend_from_slice(b"]\n");
        let mut response = streamed_json(Body::from(body));
        if let Some(next) = &selected.next {
            let cursor = next.encode()?;
            let separator = if self.query.is_empty() { "" } else { "&" };
            // Relative to the URL of the request, which a proxy may have changed.
            let link = format!("<?{}{separator}cursor={cursor}>; rel=\"next\"", self.query);
            let to_header = |text: String| {
                HeaderValue::try_from(text).map_err(|error| Error::Internal(error.to_string()))
            };
            response.headers_mut().insert(header::LINK, to_header(link)?);
            response.headers_mut().insert(NEXT_CURSOR, to_header(cursor)?);
        }
        Ok(response)
    }
}

/// Selects the first records in an order, of which it keeps about as many as are returned.
struct Sorting<'a> {
    request: &'a ListRequest,
    sort: &'a Sort,
    after: Option<&'a Position>,
    kept: Vec<(Position, Vec<u8>)>,
}

impl<'a> Sorting<'a> {
    fn new(request: &'a ListRequest) -> Result<Self> {
        let sort = request.sort.as_ref().unwrap_or(&request.fields.default_sort);
        let after = match &request.cursor {
            None => None,
            Some(Cursor::Sorted(order, position)) if *order == sort.to_string() => Some(position),
            Some(_) => return Err(wrong_cursor()),
        };
        Ok(Self { request, sort, after, kept: Vec::new() })
    }

    fn add(&mut self, record: &impl Serialize) -> Result<()> {
        let value = to_value(record)?;
        if !self.request.matches(&value) {
            return Ok(());
        }
        let of = |field: &str| SortValue::of(field_of(&value, field));
        let position = Position::new(of(&self.sort.field), of(&self.request.fields.identity));
        if self.after.is_none_or(|after| position.compare(after, self.sort).is_gt()) {
            self.kept.push((position, to_bytes(record)?));
            if self.kept.len() >= 2 * (self.request.limit + 1) {
                self.trim();
            }
        }
        Ok(())
    }

    /// Sorts, and removes what does not fit into the page. One more record shows that there is another page.
    fn trim(&mut self) {
        let sort = self.sort;
        self.kept.sort_by(|(a, _), (b, _)| a.compare(b, sort));
        self.kept.truncate(self.request.limit + 1);
    }

    fn finish(mut self) -> Result<SelectedRecords> {
        self.trim();
        let has_more = self.kept.len() > self.request.limit;
        self.kept.truncate(self.request.limit);
        let last = self.kept.last().filter(|_| has_more);
        let next = last.map(|(position, _)| Cursor::Sorted(self.sort.to_string(), position.clone()));
        Ok(SelectedRecords { records: self.kept.into_iter().map(|(_, record)| record).collect(), next })
    }
}

fn wrong_cursor() -> Error {
    invalid(ListParameter::Cursor, "belongs to another list or sort; omit it to start again")
}

fn to_value(record: &impl Serialize) -> Result<Value> {
    serde_json::to_value(record).map_err(|error| Error::Internal(error.to_string()))
}

fn to_bytes(record: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(record).map_err(|error| Error::Internal(error.to_string()))
}

/// Parses a limit. The handler of a history reads it itself.
fn limit(fields: &ListFields, text: Option<&str>) -> Result<usize> {
    let text = text.filter(|_| !fields.is_history);
    let limit = text.map_or(Some(MAX_LIMIT), |text| text.parse().ok());
    let limit = limit.filter(|limit| (1..=MAX_LIMIT).contains(limit)).ok_or_else(|| {
        let text = shown(text.unwrap_or_default());
        invalid(ListParameter::Limit, &format!("must be an integer from 1 to {MAX_LIMIT}, not {text:?}"))
    })?;
    Ok(usize::try_from(limit).unwrap_or_default())
}

/// Parses an order.
fn sort(fields: &ListFields, text: &str) -> Result<Sort> {
    let sort = Sort::parse(text);
    if fields.is_history {
        if sort != fields.default_sort {
            let text = format!("must be {}: events are only returned newest first", fields.default_sort);
            return Err(invalid(ListParameter::Sort, &text));
        }
    } else if fields.kind(&sort.field).is_none() {
        let names = fields.names();
        let text =
            format!("unknown field {:?}, use one of: {names}; with - for descending", shown(&sort.field));
        return Err(invalid(ListParameter::Sort, &text));
    }
    Ok(sort)
}
